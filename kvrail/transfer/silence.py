"""A bound on how long a sender may be silent."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from kvrail.errors import WorkerUnavailableError

T = TypeVar("T")


async def unless_silent(awaitable: Awaitable[T], silence_s: float) -> T:
    """What is awaited. Raises WorkerUnavailableError where it takes longer than `silence_s` seconds."""
    try:
        async with asyncio.timeout(silence_s):  # unlike wait_for, Python 3.11's too, it loses no cancellation
            return await awaitable
    except TimeoutError:
        raise WorkerUnavailableError(f"the sender was silent for {silence_s:g} s") from None
