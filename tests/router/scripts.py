"""What workers and answers of tests have in common: workers that fail, hang and die."""

import asyncio
from collections.abc import AsyncIterator

import httpx

from kvrail.errors import KvrailError, WorkerUnavailableError
from kvrail.services.router.fleet.policy import able
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.wire.v1 import decode_pb2
from tests.router.cluster import Script, write_output


def failing(error: KvrailError, after: int = 0) -> Script:
    """A worker that fails after `after` tokens."""

    async def script(worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
        for _ in range(after):
            yield decode_pb2.GenerateReply(token_ids=[10], text="x")
        raise error

    return script


def hanging(after: int = 0) -> Script:
    """A worker that says no more after `after` tokens."""

    async def script(worker, request) -> AsyncIterator[decode_pb2.GenerateReply]:
        for _ in range(after):
            yield decode_pb2.GenerateReply(token_ids=[10], text="x")
        await asyncio.Event().wait()

    return script


def dying(after: int) -> Script:
    """Says what it should, and is lost after so many tokens."""

    async def script(worker, request):
        said = 0
        async for reply in write_output(worker, request):
            if said == after:
                raise WorkerUnavailableError("gone")
            said += 1
            yield reply

    return script


def error_of(answer: httpx.Response, status_code: int, code: str | None) -> str:
    assert answer.status_code == status_code, answer.text
    assert answer.json()["error"]["code"] == code
    return answer.json()["error"]["message"]


def able_prefill(pool: WorkerPool) -> list[str]:
    """Prefill workers that take requests."""
    return [candidate.target for candidate in able(pool.candidates()[1])]
