"""Sends a load and collects what came of it."""

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrail.runtime import loops
from kvrail.tools.bench.answers import Answer, Failure, read
from kvrail.tools.bench.client import Client, Reply
from kvrail.tools.bench.load import Load, Request, requests_of


@dataclass(slots=True)
class Run:
    """What came of a load. seconds: from its begin to the end of the last reply.

    unfinished: requests that had not been sent, or not ended, when the run was interrupted. cpu_seconds: of this
    process, meanwhile.
    """

    load: Load
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    unfinished: int = 0

    def add(self, found: Answer | Failure) -> None:
        """Count one reply."""
        if isinstance(found, Answer):
            self.answers.append(found)
        else:
            self.failures.append(found)


def measure(client: Client, load: Load, model: str) -> Run:
    """Send a load and wait for all replies, or for Ctrl-C.

    Prompts are made before the clock starts, replies are read after it has stopped.
    """
    run = Run(load)
    requests = list(requests_of(load, model))
    replies: list[tuple[Request, Reply]] = []
    loops.keep_what_is_here()  # a collection of garbage that looks at all prompts would be a gap in every stream
    try:
        loops.run(_send(client, requests, run, replies))
    except KeyboardInterrupt:
        if not run.seconds:
            raise  # nothing was sent; otherwise what is missing is counted below
    finally:
        gc.unfreeze()
    run.unfinished = len(requests) - len(replies)
    for request, reply in replies:
        run.add(read(reply, request.output_tokens))
    return run


async def _send(client: Client, requests: Sequence[Request], run: Run, replies: list[tuple[Request, Reply]]) -> None:
    """Send each request as a stream becomes free, or, in an open loop, at its arrival."""

    async def ask(request: Request) -> None:
        replies.append((request, await client.ask(request.body)))

    async def stream() -> None:
        for request in waiting:
            await ask(request)

    waiting = iter(requests)
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(run.load.streams):
                tasks.create_task(stream())
            if not run.load.streams:
                for request in waiting:
                    await asyncio.sleep(begin + request.arrival - time.perf_counter())
                    tasks.create_task(ask(request))
    finally:
        run.seconds, run.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        client.close()
