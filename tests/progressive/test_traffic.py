"""Ten or sixteen requests at once, of mixed stages, codecs and lengths; some are cancelled, some lose prefill workers.

Nothing is left to the clock: later stages wait for drafts, a client leaves at a certain piece of news or frame, a
prefill worker dies at a certain later stage. What is left over is none, and whoever stays has the answer that it has
alone.
"""

import asyncio
import random
from dataclasses import dataclass

import pytest

from benchmarks.codec_data import DEMO, corpus
from kvrail.errors import WorkerUnavailableError
from kvrail.text import load_tokenizer
from kvrail.transfer.sizes import first_recent_page
from tests.cluster.cluster import cluster
from tests.cluster.staged import held_bytes, on_send
from tests.progressive.anchors import broken_anchors  # noqa: F401  a fixture
from tests.progressive.gates import Gates
from tests.progressive.test_same_output import PROMPTS

PAGE = 16
STAGED = ("splitzip-progressive-ans", "lynx-exact", "half-right", "all-noise")
CODECS = (*STAGED, "splitzip-channel", "raw")
SHARED = {"kv_dtype": "bfloat16", "page_size": PAGE, "max_batch_tokens": 256, "max_frame_bytes": 1 << 17}
AMPLE = 900
"""Pages for all at once."""
TRAFFIC = [(7, "tcp", AMPLE, 10), (1, "tcp", AMPLE, 16), (0, "inproc", AMPLE, 16), (2, "tcp", 180, 16)]
"""Seeds, transports, numbers of pages and of requests; one of them where tests shall be quick."""
RESERVE = 40
"""Pages for the drafts of ten requests; with fewer left, no later stage waits for drafts that nobody may make."""


@dataclass
class Asked:
    """One request and its fate.

    drafts: that its later stages wait for. leaves: its client does, at so many pieces of news or, where `at_frames`,
    frames; None: it stays. deaths: for each prefill worker that it loses, after how many later stages.
    """

    name: str
    prompt: list[int]
    options: dict
    drafts: int
    leaves: int | None
    at_frames: bool
    deaths: list[int]


def requests(seed, at_once):
    ids = load_tokenizer(str(DEMO)).encode(corpus(), add_special_tokens=False)
    rng = random.Random(seed)
    shared = ids[:200]
    for number in range(at_once):
        length = rng.choice([rng.randint(1, 60), rng.randint(60, 300), rng.randint(60, 300), rng.randint(300, 600)])
        begin = rng.randint(0, len(ids) - length)
        prompt = [*shared[: rng.choice([0, 0, 50, 200])], *ids[begin : begin + length]]
        output = rng.randint(2, 32)
        options = {
            "codec": rng.choice((*STAGED, *STAGED, *CODECS)),
            "max_tokens": output,
            "temperature": rng.choice([0.0, 0.8]),
            "seed": number,
            "n": rng.choice([1, 1, 1, 1, 2]),
        }
        drafts = rng.randint(0, output - 1) if options["n"] == 1 else 0
        leaves = rng.randint(1, 25) if rng.random() < 0.35 else None
        deaths = [rng.randint(0, 3) for _ in range(rng.choice([0, 0, 1, 2]))]
        yield Asked(f"s{seed}-{number}", prompt, options, drafts, leaves, rng.random() < 0.4, deaths)


class Traffic:
    """Asks all at once and brings about what each is fated to."""

    def __init__(self, monkeypatch, c, asked):
        self.c = c
        self.asked = {each.name: each for each in asked}
        self.gates = Gates(monkeypatch, self._on_event)
        self.tasks = {}
        self.news = dict.fromkeys(self.asked, 0)
        self.frames = dict.fromkeys(self.asked, 0)
        self.later = dict.fromkeys(self.asked, 0)
        self.deaths = {each.name: list(each.deaths) for each in asked}
        self.died = 0
        self.died_drafting = 0

        async def fated(sender, header, stage):
            self._on_frame(header)

        on_send(monkeypatch, fated)

    async def run(self):
        """Each request's answer, or the error that it ended in."""
        workers = list(self.c.prefills)
        for number, each in enumerate(self.asked.values()):
            self.gates.close(each.name, each.drafts)
            order = workers[:: 1 if number % 2 else -1]
            asking = self.c.ask(each.prompt, workers=order, request_id=each.name, **each.options)
            self.tasks[each.name] = asyncio.create_task(asking)
        return await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def _on_event(self, name, event):
        self.news[name] += 1
        if not self.asked[name].at_frames:
            self._leave_at(name, self.news[name])
        pages = self.c.decode.engine.status().pages
        if pages.free + pages.cached < RESERVE:
            self.gates.open_all()

    def _on_frame(self, header):
        name = header.request_id
        self.frames[name] += 1
        if self.asked[name].at_frames:
            self._leave_at(name, self.frames[name])
        if not header.stage or header.first_page >= first_recent_page(len(self.asked[name].prompt), PAGE):
            return
        self.later[name] += 1
        if self.deaths[name] and self.later[name] > self.deaths[name][0]:
            self.later[name] = 0
            self.deaths[name].pop(0)
            self.died += 1
            self.died_drafting += self.gates.drafts[name] > 0
            raise WorkerUnavailableError("the worker died")

    def _leave_at(self, name, count):
        if count == self.asked[name].leaves:
            self.tasks[name].cancel()


@pytest.mark.parametrize(("seed", "transport", "pages", "at_once"), TRAFFIC[: None if PROMPTS > 1 else 1])
@pytest.mark.usefixtures("broken_anchors")
async def test_nothing_leaks_nobody_starves_and_answers_are_those_of_one_alone(
    monkeypatch, seed, transport, pages, at_once
):
    asked = list(requests(seed, at_once))
    decode = {"num_pages": pages, "transfer_timeout_s": 3600}
    async with cluster(DEMO, transport, prefill_count=2, num_pages=AMPLE, decode=decode, **SHARED) as c:
        traffic = Traffic(monkeypatch, c, asked)
        together = await traffic.run()
        await c.settled()
        for worker in (c.decode, *c.prefills.values()):
            assert worker.engine._tracker.idle
        assert not held_bytes(c) and not any(queue.held_bytes for queue in traffic.gates.queues)
    monkeypatch.undo()
    left = 0
    async with cluster(DEMO, "inproc", num_pages=400, prefix_cache=False, **SHARED) as c:
        for each, answer in zip(asked, together, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                assert each.leaves is not None
                left += 1
                continue
            assert not isinstance(answer, BaseException), (each.name, answer)
            alone = await c.ask(each.prompt, **{**each.options, "codec": "raw"})
            assert answer.tokens == alone.tokens and answer.text == alone.text, (each, answer.summary)
    assert left >= 2 and traffic.died >= 2
    if pages == AMPLE:
        assert traffic.died_drafting >= 1
        assert sum(traffic.gates.drafts[each.name] > 0 for each in asked) >= 4
