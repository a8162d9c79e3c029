"""Delivery in stages: what leaves when, what drafts come to, and that the output is that of the whole KV."""

import asyncio
import itertools
import random

import pytest
import torch

from kvrail.engine.schedule.tracker import RequestTracker
from kvrail.transfer.receiving import PageReceiver
from kvrail.transfer.send_queue import LATER_SLOTS, SLOTS, SendQueue
from kvrail.transfer.sizes import first_recent_page
from tests.cluster.cluster import TRANSPORTS, cluster, each_with_a_transport
from tests.cluster.halves import staged_codecs  # noqa: F401  a fixture
from tests.cluster.staged import (
    PAGE,
    SHARED,
    drafted,
    first_stages_left,
    held_bytes,
    hold_later_stages,
    kept_bytes,
    note_frames,
    on_send,
)
from tests.cluster.test_equality import prompt_of
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("staged_codecs")
LENGTHS = (1, 15, 16, 17, 200, 700)


@pytest.fixture
def llama():
    return tiny_model("llama")


def assert_close(logprobs, wanted):
    """The same tokens, with the same probabilities but for rounding: verification computes several at once."""
    for index, items in wanted.items():
        for ours, theirs in zip(logprobs[index], items, strict=True):
            assert [t.token_id for t in ours.top] == [t.token_id for t in theirs.top]
            both = [[item.logprob, *(t.logprob for t in item.top)] for item in (ours, theirs)]
            assert both[0] == pytest.approx(both[1], abs=1e-4)


@pytest.mark.parametrize("codec,transport", each_with_a_transport(["noise", "halves", "halves"]))
async def test_tokens_equal_raws_whatever_is_drafted(llama, transport, codec):
    async with cluster(llama, transport, prefix_cache=False, **SHARED) as c:
        for asked, lengths in (({}, LENGTHS), ({"temperature": 0.8, "seed": 5, "logprobs": 2}, LENGTHS[3::2])):
            prompts = [prompt_of(length) for length in lengths]
            whole = await asyncio.gather(*(c.ask(prompt, codec="raw", **asked, max_tokens=24) for prompt in prompts))
            for length, prompt, raw in zip(lengths, prompts, whole, strict=True):
                staged = await c.ask(prompt, codec=codec, **asked, max_tokens=24)
                assert staged.tokens == raw.tokens and staged.text == raw.text, length
                assert_close(staged.logprobs, raw.logprobs)
                assert staged.summary.codec == codec and not staged.summary.lossy
                assert staged.summary.completion_tokens == 24
        await c.settled()
        assert not held_bytes(c)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_drafts_are_made_while_later_stages_wait_and_verified_when_they_come(llama, monkeypatch, transport):
    gate = asyncio.Event()
    hold_later_stages(monkeypatch, gate.wait)
    prompt = prompt_of(300)
    async with cluster(llama, transport, prefix_cache=False, decode={"max_drafts": 12}, **SHARED) as c:
        raw = await c.ask(prompt, codec="raw", max_tokens=40)
        replies = []
        asking = asyncio.create_task(c.ask(prompt, codec="halves", max_tokens=40, on_reply=replies.append))
        await drafted(c.decode, 12)
        assert sum(len(reply.token_ids) for reply in replies) == 1  # the first token alone is certain
        coarse_pages = first_recent_page(len(prompt), PAGE)
        assert kept_bytes(c) == coarse_pages * c.decode.model.loaded.layout.page_bytes
        gate.set()
        answer = await asking
        assert answer.tokens == raw.tokens
        summary = answer.summary
        assert summary.drafts_proposed == 12 and 0 < summary.drafts_accepted <= 12
        marks = {mark.moment: mark.seconds for mark in summary.marks}
        # Which of the first two comes first is not said: they are taken by tasks of their own.
        assert max(marks["first_token"], marks["kv_coarse"]) < marks["kv_complete"]
        assert marks["kv_complete"] < marks["verified"] < marks["finished"]
        await c.settled()
        assert not held_bytes(c)
        share = c.decode.meters.transfers.hidden_share
        assert share.read()[1] > 0


async def test_frames_of_one_request_come_first_stages_first_and_recent_pages_whole(llama, monkeypatch):
    headers = note_frames(monkeypatch)
    hold_later_stages(monkeypatch, lambda: first_stages_left(headers, -(-length // PAGE)))
    for length in (100, 304, 305, 700):
        recent = first_recent_page(length, PAGE)
        headers.clear()
        async with cluster(llama, "inproc", prefix_cache=False, **SHARED) as c:
            await c.ask(prompt_of(length), codec="halves", max_tokens=2)
            await c.settled()
        assert [header.sequence for header in headers] == list(range(len(headers)))
        whole = [header.first_page >= recent for header in headers]
        assert all(
            w or header.first_page + header.spec.num_pages <= recent for w, header in zip(whole, headers, strict=True)
        )
        late = [number for number, (w, header) in enumerate(zip(whole, headers, strict=True)) if header.stage and not w]
        stage_0 = [number for number, header in enumerate(headers) if header.stage == 0]
        assert len(late) == sum(not w for w in whole) / 2
        places = {(header.stage, header.first_layer, header.first_page): n for n, header in enumerate(headers)}
        for (stage, layer, page), number in places.items():
            if stage and page >= recent:  # but for frames that had a slot of the queue already
                assert 0 < number - places[0, layer, page] <= SLOTS
        assert late and stage_0


async def test_first_stages_of_a_cached_prompt_leave_first_and_later_ones_from_its_end(llama, monkeypatch):
    headers = note_frames(monkeypatch)
    options = {**SHARED, "decode": {"prefix_cache": False}}
    async with cluster(llama, "tcp", **options) as c:
        await c.ask(prompt_of(700), codec="halves")
        headers.clear()
        answer = await c.ask(prompt_of(700), codec="halves")
        await c.settled()
    assert answer.summary.cached_tokens == 0
    cached = [h for h in headers if h.first_page + h.spec.num_pages <= first_recent_page(700, PAGE)]
    stages = [h.stage for h in cached]
    assert stages == sorted(stages) and len(stages) > 20 and set(stages) == {0, 1}
    later = [(-h.first_page, h.first_layer) for h in cached if h.stage]
    assert later == sorted(later) and len({page for page, _ in later}) > 1


async def test_a_later_stage_is_framed_while_the_one_before_leaves(llama, monkeypatch):
    headers, most = note_frames(monkeypatch), 0
    length, leaving = 700, asyncio.Event()

    async def patiently(sender, header, stage):
        nonlocal most
        if header.stage and header.first_page < first_recent_page(length, PAGE):
            most += 1  # it has not left before it is said to have
            await leaving.wait()

    on_send(monkeypatch, patiently)
    hold_later_stages(monkeypatch, lambda: first_stages_left(headers, -(-length // PAGE)))
    async with cluster(llama, "tcp", prefix_cache=False, **SHARED) as c:
        answer = asyncio.create_task(c.ask(prompt_of(length), codec="halves"))
        async with asyncio.timeout(20):
            while most < LATER_SLOTS:
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        assert most == LATER_SLOTS == 2
        leaving.set()
        assert (await answer).tokens == (await c.ask(prompt_of(length), codec="raw")).tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_later_request_drafts_before_an_earlier_ones_later_stages_leave(llama, monkeypatch, transport):
    headers = note_frames(monkeypatch)
    gate = asyncio.Event()
    hold_later_stages(monkeypatch, gate.wait)
    prompts = {"early": prompt_of(700), "late": prompt_of(400)}
    async with cluster(llama, transport, prefix_cache=False, decode={"max_drafts": 8}, **SHARED) as c:
        early = asyncio.create_task(c.ask(prompts["early"], codec="halves", request_id="early"))
        await drafted(c.decode, 8)
        late = asyncio.create_task(c.ask(prompts["late"], codec="halves", request_id="late"))
        await drafted(c.decode, 16)
        waiting = {
            name: not any(h.stage and h.first_page == 0 for h in headers if h.request_id == name) for name in prompts
        }
        assert waiting == {"early": True, "late": True} and held_bytes(c) > 0
        gate.set()
        for prompt, answer in zip(prompts.values(), await asyncio.gather(early, late), strict=True):
            assert answer.tokens == (await c.ask(prompt, local=True)).tokens
        await c.settled()
        assert not held_bytes(c)


async def test_held_payloads_stay_below_their_bound(llama, monkeypatch):
    most, now = 0, []
    hold = SendQueue.hold

    def noting(queue, payload_bytes):
        nonlocal most
        hold(queue, payload_bytes)
        now.append(payload_bytes)
        most = max(most, queue.held_bytes)

    monkeypatch.setattr(SendQueue, "hold", noting)

    async def bound_reached():
        while most < bound:
            await asyncio.sleep(0.002)

    hold_later_stages(monkeypatch, bound_reached)
    bound = 20_000
    begin = SendQueue.__init__
    monkeypatch.setattr(SendQueue, "__init__", lambda link, _, **options: begin(link, bound, **options))
    prompts = [prompt_of(900, seed) for seed in range(4)]
    async with cluster(llama, "tcp", prefix_cache=False, **SHARED) as c:
        answers = await asyncio.gather(*(c.ask(prompt, codec="halves") for prompt in prompts))
        await c.settled()
        assert not held_bytes(c)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == (await c.ask(prompt, local=True)).tokens
    assert sum(now) > 5 * bound
    assert bound <= most < bound + SLOTS * max(now)


@pytest.mark.parametrize("first,transport", each_with_a_transport([1, 6, 11]))
async def test_leaving_between_stages_returns_every_page_and_payload(llama, monkeypatch, first, transport):
    """Cancelled after each number of frames, before the later stages, while drafting and while verifying."""
    rng = random.Random(3)
    sent = 0

    async def counting(sender, header, stage):
        nonlocal sent
        sent += 1
        if sent == stop_after:
            reached.set()

    on_send(monkeypatch, counting)
    async with cluster(llama, transport, num_pages=120, **SHARED) as c:
        for stop_after in range(first, 60, 15):
            sent, reached = 0, asyncio.Event()
            prompt = prompt_of(rng.randint(150, 500), seed=stop_after)
            task = asyncio.create_task(c.ask(prompt, codec="halves", max_tokens=50))
            await asyncio.wait([task, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            await asyncio.wait([task])
            await c.settled()
            assert not held_bytes(c)
        gate = asyncio.Event()
        hold_later_stages(monkeypatch, gate.wait)
        for count in (1, 5, 20):
            prompt = prompt_of(300, seed=count)
            task = asyncio.create_task(c.ask(prompt, codec="halves", max_tokens=90))
            await drafted(c.decode, count)
            if count == 20:
                gate.set()  # verification begins
            task.cancel()
            await asyncio.wait([task])
            await c.settled()
            assert not held_bytes(c)


async def test_what_a_transfer_refined_serves_as_prefix(llama):
    """Pages that were coarse for a while are exact when they are cached."""
    prompt = prompt_of(400)
    async with cluster(llama, "tcp", **SHARED) as c:
        await c.ask(prompt, codec="halves")
        longer = [*prompt, *prompt_of(50, seed=2)]
        answer = await c.ask(longer, codec="raw")
        assert answer.summary.cached_tokens == 400
        await c.settled()
    async with cluster(llama, "tcp", prefix_cache=False, **SHARED) as c:
        assert (await c.ask(longer, codec="raw")).tokens == answer.tokens


async def test_recent_pages_are_never_written_after_drafting_began(llama, monkeypatch):
    written = []
    receive = RequestTracker.receive_coarse_kv

    def noting(tracker, request_id):
        written.append("coarse")
        receive(tracker, request_id)

    monkeypatch.setattr(RequestTracker, "receive_coarse_kv", noting)
    land = PageReceiver._land

    def landing(receiver, arrival, *args):
        header = arrival.header
        written.append((header.stage, header.first_page, header.first_page + header.spec.num_pages))
        return land(receiver, arrival, *args)

    async def drafting_began():
        while "coarse" not in written:
            await asyncio.sleep(0.002)

    monkeypatch.setattr(PageReceiver, "_land", landing)
    hold_later_stages(monkeypatch, drafting_began)
    for length in (300, 304, 310):
        written.clear()
        async with cluster(llama, "tcp", prefix_cache=False, **SHARED) as c:
            await c.ask(prompt_of(length), codec="halves")
            await c.settled()
        begun = written.index("coarse")
        assert all(stage and end <= first_recent_page(length, PAGE) for stage, _, end in written[begun + 1 :])
        assert len(written) > begun + 1


async def test_sixteen_requests_of_mixed_stages_with_random_cancellation(llama):
    rng = random.Random(11)
    asked = [
        (prompt_of(rng.randint(1, 700), seed), {"codec": codec, "temperature": 0.8 * (seed % 2), "seed": seed})
        for seed, codec in zip(range(16), itertools.cycle(["halves", "raw", "noise", "splitzip-channel"]))
    ]
    async with cluster(llama, num_pages=400, **SHARED) as c:
        alone = [(await c.ask(prompt, **options, max_tokens=16)).tokens for prompt, options in asked]
        for _ in range(2):
            tasks = [asyncio.create_task(c.ask(prompt, **options, max_tokens=16)) for prompt, options in asked]
            for task in tasks[::3]:
                await asyncio.sleep(rng.random() * 0.05)
                task.cancel()
            together = await asyncio.gather(*tasks, return_exceptions=True)
            assert [t.tokens for n, t in enumerate(together) if n % 3] == [t for n, t in enumerate(alone) if n % 3]
            await c.settled()
            assert not held_bytes(c)


async def test_pages_are_the_prefill_workers_bit_for_bit(llama):
    from tests.cluster.test_codecs import content

    async with cluster(llama, "tcp", **SHARED) as c:
        (prefill,) = c.prefills.values()
        for length in LENGTHS:
            prompt = prompt_of(length)
            await c.ask(prompt, codec="halves")
            await c.settled()
            for theirs, ours in zip(content(prefill, prompt), content(c.decode, prompt), strict=True):
                assert torch.equal(theirs, ours)
