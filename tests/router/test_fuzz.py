"""Whatever is sent is answered or refused; a stream beside it has every token, and nothing is kept."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import psutil

from kvrail.text import Tokenizer
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import MODEL, logprobs_for, prompt_scores, summary
from tests.router.process import Running, run_router

ROOT = Path(__file__).parents[2]
BODIES = int(os.environ.get("KVRAIL_FUZZ_BODIES", "250"))
MEASURED = "KVRAIL_FUZZ_BODIES" in os.environ
"""Whether somebody reads what the stream felt; then it also goes on for as long without any bodies."""
MOST_GROWTH = 200 << 20
"""Of the router's memory, from one half to the next: what a few large bodies take, not many."""


class Beside:
    """A stream that goes on while others are answered; `gaps_s`: times in which nothing came of it."""

    def __init__(self) -> None:
        self.over = False
        self.count = 0
        self.gaps_s: list[float] = []

    async def script(self, worker, request):
        """Endless for the one, short for the others."""
        while request.sampling.max_tokens == 499 and not self.over:
            ids = [10] if self.count < 400 else []  # no more tokens than were asked for, however slow the machine is
            yield decode_pb2.GenerateReply(token_ids=ids, text=f"{self.count} ")
            self.count += 1
            await asyncio.sleep(0.005)
        sampling = request.sampling
        for reply in prompt_scores(request):
            yield reply
        for index in range(sampling.n):
            last = decode_pb2.FINISH_REASON_LENGTH
            logprobs = [logprobs_for(10, sampling.logprobs)] if sampling.HasField("logprobs") else []
            yield decode_pb2.GenerateReply(index=index, token_ids=[10], text="x", logprobs=logprobs, finish_reason=last)
        yield decode_pb2.GenerateReply(summary=summary(len(request.prompt_token_ids), sampling.n))

    async def read(self, running: Running) -> str:
        """The stream's text."""
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 499}
        text = ""
        async with running.http.stream("POST", "/v1/completions", json=body) as answer:
            last = time.perf_counter()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    now = time.perf_counter()
                    self.gaps_s.append(now - last)
                    last = now
        return text

    def felt(self) -> str:
        """The gaps since the last call, in words."""
        gaps, self.gaps_s = sorted(self.gaps_s), []
        shares = (0.5, 0.99, 0.999, 1.0)
        times = (f"{100 * share:g} % {1e3 * gaps[int(share * (len(gaps) - 1))]:.1f}" for share in shares)
        return f"{len(gaps)} gaps, ms: {', '.join(times)}"


async def fuzz(running: Running, seed: int) -> dict:
    command = [sys.executable, "-m", "tests.router.fuzz", str(running.http.base_url), str(BODIES // 2), str(seed)]
    sending = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    printed, _ = await sending.communicate()
    assert sending.returncode == 0
    return json.loads(printed)


async def test_whatever_is_sent_is_answered_or_refused(model_folder: Path, tokenizer: Tokenizer):
    beside = Beside()
    async with run_router(model_folder, tokenizer, beside.script) as running:
        router = psutil.Process(running.process.pid)
        reading = asyncio.create_task(beside.read(running))
        memory, begin = [], time.perf_counter()
        for seed in range(2):
            report = await fuzz(running, seed)
            assert not report["wrong"]
            assert {"200", "400"} <= report["statuses"].keys()
            assert not reading.done()
            memory.append(router.memory_info().rss)
            print(report["statuses"], f"{memory[-1] >> 20} MiB;", beside.felt())  # noqa: T201
        if MEASURED:
            await asyncio.sleep(time.perf_counter() - begin)
            print("without bodies:", beside.felt())  # noqa: T201
        beside.over = True
        assert await reading == "".join(f"{i} " for i in range(beside.count)) + "x"
        assert memory[1] < memory[0] + MOST_GROWTH
        assert (await running.http.get("/health")).json()["active_requests"] == 0
