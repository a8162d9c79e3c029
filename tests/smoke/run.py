"""One case: a cluster of real processes, a crowd at once, then each of its requests alone."""

import asyncio
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from kvrail.cli.cluster.gpus import visible_gpus
from tests.smoke.cases import Case
from tests.smoke.client import Answer, FailedRequestError, ask, difference
from tests.smoke.mix import TRANSFORMERS_KNOWS, Asked, crowd
from tests.smoke.state import ROOT

START_S, REQUEST_S, CODEC_S = 240, 120, 120
FAULTS = re.compile(r"Traceback|ERROR|CRITICAL|step failed|broken down")
"""In the log of a cluster in which nothing is to go wrong."""


@dataclass(slots=True)
class Outcome:
    """What came of a case. faults: failures, differences and what else must not be, as text.

    differ: answers that were others alone, where usage says that the batch may change them.
    """

    case: str
    requests: int = 0
    crossed: int = 0
    differ: int = 0
    codecs: dict[str, int] = field(default_factory=dict)
    compared_with_transformers: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


async def run(case: Case, model: Path, device: str, count: int, longest: int, gpu: str | None = None) -> Outcome:
    """Run a case, all workers on one GPU; whatever goes wrong is in its faults. gpu: None for the first there is."""
    begin, outcome = time.monotonic(), Outcome(case.name)
    try:
        async with cluster(case, model, device, outcome.faults, gpu) as (url, _):
            limits = httpx.Limits(max_connections=count)
            async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits) as client:
                await _compare(client, case, model, list(crowd(count, longest=longest)), outcome)
    except (RuntimeError, FailedRequestError, TimeoutError) as error:
        outcome.faults.append(f"{type(error).__name__}: {error}")
    outcome.seconds = round(time.monotonic() - begin, 1)
    return outcome


async def _compare(client: httpx.AsyncClient, case: Case, model: Path, asked: list[Asked], outcome: Outcome) -> None:
    if case.codec:
        await _until_ready(client, case.codec)
    together = await asyncio.gather(*(ask(client, each) for each in asked), return_exceptions=True)
    outcome.requests = len(asked)
    codecs: Counter[str] = Counter()
    for each, found in zip(asked, together, strict=True):
        if isinstance(found, BaseException):
            outcome.faults.append(f"{each.kind}: {found or type(found).__name__}")
        elif found is not None:
            told = found.usage.get("kvrail", {})
            outcome.crossed += told.get("prefill_worker") is not None
            codecs.update(filter(None, [told.get("codec")]))
            alone = await ask(client, each)
            assert alone is not None
            differs = difference(found, alone, logprobs=told["invariant"])  # experts may change them for some tokens
            if differs is not None and not (told["invariant"] or case.float32):
                outcome.differ += 1
            elif differs is not None:
                outcome.faults.append(f"{each.kind}, {len(each.body['prompt'])} tokens: together and alone: {differs}")
    outcome.codecs = dict(codecs)
    if case.remote and outcome.crossed < len(asked) // 4:
        outcome.faults.append(f"{outcome.crossed} of {len(asked)} prompts were computed by a prefill worker")
    if case.codec and set(codecs) != {case.codec}:
        outcome.faults.append(f"prompts crossed by {dict(codecs)}, not by {case.codec} alone")
    if case.float32:  # beside the loop, which other cases' requests need: the router waits 10 s for a request's headers
        await asyncio.to_thread(_compare_with_transformers, model, asked, together, outcome)


def _compare_with_transformers(model: Path, asked: list[Asked], found: list[object], outcome: Outcome) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    for each, answer in zip(asked, found, strict=True):
        prompt = each.body["prompt"]
        if each.kind != TRANSFORMERS_KNOWS or not isinstance(answer, Answer) or len(prompt) > 700:
            continue
        with torch.inference_mode():
            tokens = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=each.body["max_tokens"],
                min_new_tokens=each.body["max_tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
        outcome.compared_with_transformers += 1
        if tokens != answer.choices[0].token_ids:
            outcome.faults.append(
                f"{len(prompt)} tokens: transformers gives {tokens}, not {answer.choices[0].token_ids}"
            )


async def _until_ready(client: httpx.AsyncClient, codec: str) -> None:
    """Ask until the codec is compiled and serves."""
    async with asyncio.timeout(CODEC_S):
        for number in range(10_000):
            prompt = [number % 250, number // 250, *range(200)]
            answer = await ask(
                client, Asked("", {"model": "smoke", "prompt": prompt, "max_tokens": 2, "stream": False})
            )
            assert answer is not None
            if answer.usage["kvrail"]["codec"] == codec:
                return
            await asyncio.sleep(0.5)


@asynccontextmanager
async def cluster(
    case: Case, model: Path, device: str, faults: list[str], gpu: str | None = None
) -> AsyncIterator[tuple[str, int]]:
    """The address of a cluster that is healthy, and its pid. What its log tells of faults is added to `faults`."""
    log = model.parent / f"{re.sub('[^a-z0-9]+', '-', case.name.lower())}.log"
    flags = ["--model", str(model), "--served-model-name", "smoke", "--device", device, "--port", "0", *case.flags]
    flags += ["--prefill-wait-s", "1"]  # five times the default: several clusters share a card
    if "--kv-memory-gib" not in flags:
        flags += ["--kv-memory-gib", "0.5"]
    gpu = gpu or next(iter(visible_gpus()), None)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrail", "up", *flags, cwd=ROOT, stdout=out, stderr=out, env=environment
        )
    try:
        async with asyncio.timeout(START_S):
            while (found := re.search(r"kvrail chat --url (\S+)", log.read_text())) is None:
                if process.returncode is not None:
                    raise RuntimeError(f"the cluster did not start: {log.read_text()[-2000:]}")
                await asyncio.sleep(0.2)
        yield found[1], process.pid
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
        lines = log.read_text().splitlines()
        faults += [f"log: {line}" for line in lines if FAULTS.search(line)][:5]
