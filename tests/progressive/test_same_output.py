"""Every exact codec's output is raw's, token for token, however many drafts were made on the way.

The demo model reads real text in float32; KV pages are bfloat16. KVRAIL_EQUALITY_PROMPTS says how many prompts, and
KVRAIL_EQUALITY_SEED which; `make test-progressive` takes 200. With KVRAIL_EQUALITY_DTYPE=bfloat16 it computes in that,
and with KVRAIL_EQUALITY_DEVICE=cuda the workers share a GPU. With KVRAIL_EQUALITY_KV_CACHE=lossless both workers close
their pages, and raw's answers are those of two others whose pages are plain. No difference is allowed anywhere.
"""

import asyncio
import contextlib
import logging
import os
import random
from dataclasses import dataclass, field

from benchmarks.codec_data import DEMO, corpus
from kvrail.codec import registry
from kvrail.text import load_tokenizer
from tests.cluster.cluster import cluster
from tests.cluster.staged import held_bytes
from tests.progressive.gates import Gates

logger = logging.getLogger("tests.progressive")

PROMPTS = int(os.environ.get("KVRAIL_EQUALITY_PROMPTS", "1"))
SEED = int(os.environ.get("KVRAIL_EQUALITY_SEED", "137"))
DTYPE = os.environ.get("KVRAIL_EQUALITY_DTYPE", "float32")
DEVICE = os.environ.get("KVRAIL_EQUALITY_DEVICE", "cpu")
KV_CACHE = os.environ.get("KVRAIL_EQUALITY_KV_CACHE", "plain")
SHORTEST, LONGEST = 500, 4000
OUTPUT = 48
MAX_DRAFTS = 64
EXACT = (
    "splitzip",
    "splitzip-channel",
    "splitzip-ans",
    "splitzip-progressive-ans",
    "lynx-exact",
)
SHARED = {"kv_dtype": "bfloat16", "num_pages": 500, "max_batch_tokens": 1024, "max_frame_bytes": 1 << 20}
DECODE = {"prefix_cache": False, "transfer_timeout_s": 3600}
"""Every request fetches its whole prompt, and waits for drafts however slow the machine is."""


@dataclass
class Tally:
    """What the requests came to: drafts of those with several stages, and answers that are not raw's."""

    requests: int = 0
    staged: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, name, answer, raw, drafts, tokens, options):
        """Take note of an answer; drafts: how many its later stages waited for."""
        what = f"{name}, {tokens} tokens, {options or 'greedy'}, {drafts} drafts or more"
        summary = answer.summary
        assert summary.numerics == raw.summary.numerics != "", what
        assert summary.codec == name and summary.prefill_worker and not summary.lossy
        assert summary.completion_tokens == OUTPUT and summary.kv_raw_bytes == raw.summary.kv_raw_bytes > 0
        self.requests += 1
        if registry.get(name).num_stages > 1:
            assert summary.drafts_proposed >= drafts, what
            self.staged += 1
            self.drafted += summary.drafts_proposed > 0
            self.proposed += summary.drafts_proposed
            self.accepted += summary.drafts_accepted
        if answer.tokens[0] != raw.tokens[0]:
            self.differences.append(f"{what}: {answer.tokens[0]} against {raw.tokens[0]}")
            logger.warning("%s", self.differences[-1])
        else:
            assert answer.text == raw.text


def prompts(count):
    """Windows of the held-out text and the repository's documents, as token ids."""
    ids = load_tokenizer(str(DEMO)).encode(corpus(), add_special_tokens=False)
    rng = random.Random(SEED)
    for _ in range(count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        begin = rng.randint(0, len(ids) - length)
        yield ids[begin : begin + length]


async def compare(plain, c, gates, prompt, codecs, tally, rng):
    """Ask greedily and at temperature 0.8, raw of plain pages and every codec at once."""
    for each in {plain, c}:
        await each.ask(prompt, codec="raw", max_tokens=1)  # from here on the prefill workers' prefix caches have it
    for options in ({}, {"temperature": 0.8, "seed": rng.randrange(1 << 31)}):

        async def ask(c, name, drafts, options=options):
            request = f"{name}-{rng.randrange(1 << 62)}"
            gates.close(request, drafts)
            return await c.ask(prompt, codec=name, request_id=request, max_tokens=OUTPUT, **options)

        wanted = {name: min(rng.randint(0, MAX_DRAFTS), OUTPUT - 1) for name in codecs}
        raw, *answers = await asyncio.gather(ask(plain, "raw", 0), *(ask(c, *each) for each in wanted.items()))
        for (name, drafts), answer in zip(wanted.items(), answers, strict=True):
            tally.add(name, answer, raw, drafts, len(prompt), options)


async def compare_all(monkeypatch, codecs, count):
    tally, rng = Tally(), random.Random(1)
    gates = Gates(monkeypatch)
    shared = SHARED | {"dtype": DTYPE, "device": DEVICE}
    async with contextlib.AsyncExitStack() as clusters:
        plain, *closed = [
            await clusters.enter_async_context(cluster(DEMO, "tcp", decode=DECODE, kv_cache=form, **shared))
            for form in dict.fromkeys(("plain", KV_CACHE))
        ]
        c = (plain, *closed)[-1]
        for number, prompt in enumerate(prompts(count), 1):
            await compare(plain, c, gates, prompt, codecs, tally, rng)
            logger.info(
                "%d of %d prompts, the last of %d tokens: %d requests, drafts made in %d of %d, %d proposed,"
                " %d accepted; %d answers differ",
                *(number, count, len(prompt), tally.requests, tally.drafted, tally.staged),
                *(tally.proposed, tally.accepted, len(tally.differences)),
            )
        for each in {plain, c}:
            await each.settled()
            assert not held_bytes(each)
        assert all(
            worker.engine._closer.pages > count for each in closed for worker in (each.decode, *each.prefills.values())
        )
    return tally


async def test_every_exact_codec_says_what_raw_says(monkeypatch):
    made = {name for name in registry.names() if registry.get(name).exact} - {"raw"}
    assert made >= set(EXACT)
    tally = await compare_all(monkeypatch, sorted(made), PROMPTS)
    assert not tally.differences, "\n".join(tally.differences)
    assert tally.requests == 2 * PROMPTS * len(made)
    assert tally.drafted > 0.9 * tally.staged > 0
    assert 0 < tally.accepted <= tally.proposed
    if PROMPTS >= 10:  # of one prompt's all or hardly any may be right
        assert 0.1 * tally.proposed < tally.accepted < tally.proposed
