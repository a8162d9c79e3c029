"""What goes wrong between workers: lost, silent, corrupt or incompatible prefill workers, and clients that leave."""

import asyncio
import random
import threading
import time

import pytest

from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.raw.codec import RawCodec
from kvrail.errors import InvalidRequestError, KvrailError, OverloadedError, WorkerUnavailableError
from kvrail.rpc.prefill.replies import PrefillReplies
from kvrail.runtime.breaker import FAILURES
from kvrail.services.decode import fetcher, prompt_fetch
from kvrail.services.prefill import handler
from kvrail.transport.tcp import transport as tcp
from kvrail.wire.v1 import prefill_pb2
from tests.cluster.cluster import TRANSPORTS, cluster, each_with_a_transport
from tests.cluster.staged import on_send, with_payload
from tests.cluster.test_equality import prompt_of
from tests.models import generate, tiny_model


def value(worker, reason):
    return worker.meters.transfers.fallbacks[reason].value


@pytest.fixture
def llama():
    return tiny_model("llama")


async def test_no_prefill_worker_at_all(llama):
    async with cluster(llama) as c:
        answer = await c.ask(prompt_of(300), workers=["127.0.0.1:9", "127.0.0.1:9"])
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert not answer.summary.prefill_worker and value(c.decode, "local") == 1
        await c.settled()


async def test_an_alternate_takes_over(llama):
    async with cluster(llama) as c:
        (real,) = c.prefills
        answer = await c.ask(prompt_of(300), workers=["127.0.0.1:9", real])
        assert answer.summary.prefill_worker == real and value(c.decode, "alternate") == 1
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        await c.settled()


async def test_a_worker_that_fails_time_and_again_is_not_asked_for_a_while(llama, caplog):
    caplog.set_level("INFO", "kvrail.decode")
    async with cluster(llama) as c:
        (real,) = c.prefills
        for number in range(FAILURES + 1):
            assert "not asked for" not in caplog.text
            prompt = prompt_of(310)[number:]
            answer = await c.ask(prompt, workers=["127.0.0.1:9", real])
            assert answer.summary.prefill_worker == real
            assert answer.tokens == {0: generate(str(llama), tuple(prompt), 16)}
        assert caplog.text.count("127.0.0.1:9 failed: ") == FAILURES
        assert caplog.text.count("127.0.0.1:9 failed 3 requests in a row; not asked for ") == 1
        await c.settled()


async def test_prompts_that_nobody_takes_are_computed_here_up_to_a_bound(llama, monkeypatch):
    monkeypatch.setattr(fetcher, "LOCAL_FALLBACK_TOKENS", 400)
    async with cluster(llama) as c:
        held = []
        monkeypatch.setattr(c.decode.engine._tracker, "compute_here", held.append)
        prompts = [prompt_of(310)[number:] for number in range(3)]
        first = asyncio.create_task(c.ask(prompts[0], workers=["127.0.0.1:9"]))
        while not held:
            await asyncio.sleep(0.01)
        with pytest.raises(OverloadedError, match="prompts of 310 tokens wait already") as refused:
            await c.ask(prompts[1], workers=["127.0.0.1:9"])
        assert refused.value.retry_after > 0
        assert (value(c.decode, "local"), value(c.decode, "refused")) == (1, 1)
        monkeypatch.undo()
        with c.decode.engine.change() as requests:
            requests.compute_here(held[0])
        for prompt, answer in (
            (prompts[0], await first),
            (prompts[2], await c.ask(prompts[2], workers=["127.0.0.1:9"])),
        ):
            assert answer.tokens == {0: generate(str(llama), tuple(prompt), 16)}
        await c.settled()


@pytest.mark.parametrize(("after", "transport"), each_with_a_transport([0, 1, 3, 5]))
async def test_a_worker_lost_mid_transfer(llama, monkeypatch, transport, after):
    """The first tokens may be out already; the client sees one seamless answer."""
    sent = 0

    async def dying(sender, header, stage):
        nonlocal sent
        sent += 1
        if sent == after + 1:
            raise WorkerUnavailableError("the worker died")

    on_send(monkeypatch, dying)
    frame = 64 * 2 * 2 * 16 * 4 * 3
    async with cluster(llama, transport, prefill_count=2, max_frame_bytes=frame, max_batch_tokens=128) as c:
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert value(c.decode, "alternate") == 1
        await c.settled()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ending", ["is silent", "fails"])
async def test_once_the_pages_are_complete_the_calls_end_matters_to_nobody(llama, monkeypatch, transport, ending):
    """The engine decodes on the KV though the prefill worker never says that this was all."""
    complete, reached = asyncio.Event(), asyncio.Event()
    receive = prompt_fetch.PromptFetch._commit

    def received(*arguments):
        receive(*arguments)
        complete.set()

    async def commit(replies, spans=()):
        reached.set()
        if ending == "fails":
            await complete.wait()  # pages that go another way than the call may be slower than its end
            raise WorkerUnavailableError("the worker died")
        await asyncio.sleep(3600)

    monkeypatch.setattr(prompt_fetch.PromptFetch, "_commit", received)
    monkeypatch.setattr(PrefillReplies, "commit", commit)
    monkeypatch.setattr(prompt_fetch, "CALL_END_S", 0.1)
    async with cluster(llama, transport, decode={"transfer_timeout_s": 3600}) as c, asyncio.timeout(60):
        answer = await c.ask(prompt_of(300))
        assert reached.is_set() and answer.summary.prefill_worker
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        await c.settled()
        assert c.decode.meters.transfers.transfers["received", "committed"].value == 1
        assert value(c.decode, "local") == value(c.decode, "alternate") == 0


class Slow:
    """A mark of a GPU's stream that happens a while after it was made."""

    def __init__(self, *, awaited=False):
        self.at = time.monotonic() + 0.05

    def synchronize(self):
        time.sleep(max(0.0, self.at - time.monotonic()))


async def test_layers_that_are_told_late_are_sent_all_the_same(llama, monkeypatch):
    """As on a GPU: what a step completes is passed on by a thread, and the prompt may be done before that is heard."""
    async with cluster(llama, max_batch_tokens=128) as c:
        (prefill,) = c.prefills.values()
        monkeypatch.setattr(prefill.access.side, "mark", Slow)
        for number in range(5):
            prompt = prompt_of(310)[number:]
            answer = await c.ask(prompt)
            assert answer.summary.prefill_worker
            assert answer.tokens == {0: generate(str(llama), tuple(prompt), 16)}
        assert value(c.decode, "local") == 0
        await c.settled()


def note_pages(monkeypatch, worker):
    """Keys of all pages as they are when the engine is told to compute a prompt after all."""
    seen, tracker = [], worker.engine._tracker
    compute_here = tracker.compute_here

    def noting(request_id):
        seen.append(worker.access.cache.tensors["keys"].clone())
        compute_here(request_id)

    monkeypatch.setattr(tracker, "compute_here", noting)
    return seen


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_corrupt_frame_touches_no_page_and_the_answer_comes_all_the_same(llama, monkeypatch, caplog, transport):
    async def flipping(sender, header, stage):
        wrong = bytearray(stage.payload)
        wrong[-1] ^= 1
        return with_payload(stage, memoryview(wrong))

    async with cluster(llama, transport) as c:
        before = c.decode.access.cache.tensors["keys"].clone()
        pages = note_pages(monkeypatch, c.decode)
        on_send(monkeypatch, flipping)
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert len(pages) == 1 and pages[0].equal(before)
        assert value(c.decode, "local") == 1 and "digest" in caplog.text
        await c.settled()


async def test_a_wrong_bit_in_the_kv_would_be_seen(llama, monkeypatch):
    """The equality tests can fail: KV that is changed before it is framed gives other tokens."""
    encode = RawCodec.encode

    def negating(self, pages, **options):
        block = pages.gather()
        return encode(self, PagedBlock.whole(Block(block.keys * -1, block.values)), **options)

    monkeypatch.setattr(RawCodec, "encode", negating)
    async with cluster(llama) as c:
        answer = await c.ask(prompt_of(300))
        assert answer.tokens != {0: generate(str(llama), tuple(prompt_of(300)), 16)}


@pytest.mark.parametrize(
    ("decode", "reason"),
    [
        ({"page_size": 32}, "page_size) differs: decode worker 32, prefill worker 64"),
        ({"model": 1}, "model fingerprint differs"),
    ],
)
async def test_an_incompatible_worker_is_named_and_the_prompt_computed_here(llama, caplog, decode, reason):
    if "model" in decode:
        decode = {"model": str(tiny_model("llama", seed=decode["model"]))}
    async with cluster(llama, decode=decode) as c:
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(decode.get("model", str(llama)), tuple(prompt_of(300)), 16)}
        assert value(c.decode, "local") == 1 and reason in caplog.text
        await c.settled()


async def test_a_request_of_other_weights_is_refused_as_if_nobody_were_there(llama):
    async with cluster(llama, prefill_count=0) as c:
        assert (await c.ask(prompt_of(20), fingerprint=c.decode.model.loaded.fingerprint)).tokens
        with pytest.raises(WorkerUnavailableError, match="ask another worker"):
            await c.ask(prompt_of(20), fingerprint="0" * 64)
        await c.settled()


async def test_a_request_for_other_pages_is_refused_as_if_nobody_were_there(llama):
    async with cluster(llama, prefill_count=0) as c:
        assert (await c.client.get_status(timeout_s=5)).kv_cache == "plain"
        assert (await c.ask(prompt_of(20), kv_cache="plain")).tokens
        with pytest.raises(WorkerUnavailableError, match="keeps KV pages as 'plain', the request is for 'int4'"):
            await c.ask(prompt_of(20), kv_cache="int4")
        await c.settled()


async def test_a_worker_that_is_not_allowed_is_never_called(llama, caplog):
    async with cluster(llama, decode={"allowed_prefill_workers": ("elsewhere", "10.0.0.0/8")}) as c:
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert not answer.summary.prefill_worker and "--allowed-prefill-workers does not name it" in caplog.text
        await c.settled()


@pytest.mark.parametrize("request_id", ["a\nERROR forged", "x" * 65, "\x1b[2J"])
async def test_a_request_id_that_would_forge_log_lines_is_refused_by_both(llama, request_id):
    async with cluster(llama) as c:
        with pytest.raises(InvalidRequestError, match="printable"):
            await c.ask(prompt_of(20), request_id=request_id)
        ((address, _),) = c.prefills.items()
        request = prefill_pb2.PrefillRequest(request_id=request_id, prompt_token_ids=prompt_of(20))
        async with c.fetcher.workers.client(address).prefill(request, timeout_s=30) as call:
            with pytest.raises(InvalidRequestError, match="printable"):
                await call.accepted()
        await c.settled()


async def test_a_silent_worker_counts_as_lost(llama, monkeypatch):
    async def silent(sender, header, stage):
        await asyncio.sleep(3600)

    async with cluster(llama, decode={"transfer_timeout_s": 0.5}) as c:
        on_send(monkeypatch, silent)
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert value(c.decode, "local") == 1
        monkeypatch.undo()
        await c.settled()


async def test_a_data_port_that_cannot_be_reached_is_tried_once(llama, monkeypatch):
    """As behind a firewall: a try takes ten seconds, in which the prompt is computed nowhere."""
    tried = []

    async def times_out(host, port):
        tried.append(port)
        raise TimeoutError

    monkeypatch.setattr(tcp, "_connect", times_out)
    async with cluster(llama) as c:
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert not answer.summary.prefill_worker and len(tried) == 1
        await c.settled()


async def test_to_wait_for_ones_turn_is_no_silence(llama, monkeypatch):
    monkeypatch.setattr(handler, "HEARTBEAT_S", 0.1)
    async with cluster(llama, decode={"transfer_timeout_s": 1.0}, prefill={"max_running": 1}) as c:
        (prefill,) = c.prefills.values()
        execute = prefill.engine._runner.execute

        def slowly(*args):
            time.sleep(0.8)
            return execute(*args)

        monkeypatch.setattr(prefill.engine._runner, "execute", slowly)
        answers = await asyncio.gather(*(c.ask(prompt_of(300, seed=n)) for n in range(3)))
        assert all(answer.summary.prefill_worker for answer in answers)
        assert value(c.decode, "local") == 0
        await c.settled()


async def test_a_hung_prefill_worker_counts_as_lost(llama, monkeypatch):
    monkeypatch.setattr(handler, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(handler, "HUNG_S", 0.3)
    async with cluster(llama, decode={"transfer_timeout_s": 1.0}) as c:
        (prefill,) = c.prefills.values()
        go_on, execute = threading.Event(), prefill.engine._runner.execute

        def hanging(*args):
            go_on.wait(60)
            return execute(*args)

        monkeypatch.setattr(prefill.engine._runner, "execute", hanging)
        answer = await c.ask(prompt_of(300))
        assert answer.tokens == {0: generate(str(llama), tuple(prompt_of(300)), 16)}
        assert not answer.summary.prefill_worker and value(c.decode, "local") == 1
        go_on.set()
        await c.settled()


async def test_a_step_that_fails_is_told(llama, monkeypatch):
    async with cluster(llama) as c:
        monkeypatch.setattr(c.decode.engine._runner, "execute", lambda *a: 1 / 0)
        with pytest.raises(KvrailError, match="the engine failed: ZeroDivisionError"):
            await c.ask(prompt_of(300))
        monkeypatch.undo()
        assert (await c.ask(prompt_of(10))).tokens
        await c.settled()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_leaving_at_any_moment_returns_every_page(llama, transport):
    rng = random.Random(7)
    async with cluster(llama, transport, num_pages=120, max_batch_tokens=64) as c:
        for number in range(40):
            task = asyncio.create_task(c.ask(prompt_of(rng.randint(1, 900), seed=number), max_tokens=50))
            await asyncio.sleep(rng.random() * 0.08)
            task.cancel()
            await asyncio.wait([task])
        await c.settled()


async def test_draining_refuses_and_finishes(llama):
    async with cluster(llama) as c:
        replies = []
        running = asyncio.create_task(c.ask(prompt_of(300), max_tokens=60, on_reply=replies.append))
        while not replies:
            await asyncio.sleep(0.005)
        c.decode.calls.drain()
        with pytest.raises(WorkerUnavailableError, match="shutting down"):
            await c.ask([1, 2, 3])
        assert len((await running).tokens[0]) == 60
        await c.decode.calls.drained()
