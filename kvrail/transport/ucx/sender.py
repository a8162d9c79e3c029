"""The sending end of one attempt."""

import asyncio
import logging
from collections.abc import Collection
from typing import Any

import torch

from kvrail.errors import FrameError, TransferAbortedError
from kvrail.transport.base import Payload
from kvrail.transport.ucx.attempt import ACKNOWLEDGED_BELOW, LINGER_S, Attempt
from kvrail.transport.ucx.notifier import Notifier
from kvrail.transport.ucx.tags import PAYLOADS, Kind
from kvrail.transport.ucx.worker import Operation

logger = logging.getLogger(__name__)

SLOWEST = 1 << 20
"""Bytes a second of the slowest link that does not count as dead: UCX does not report a payload's progress."""


class UcxSender:
    """Sends each payload, then its size, and and, for a short one, waits for the receiver to confirm both.

    The size follows once UCX has read the payload and neither end has given up. The receiver takes no payload without
    its size. So what UCX reads of a payload that was given up, from memory that may be in other use by then, is never
    taken for a payload.
    """

    def __init__(self, attempt: Attempt, *, on_device: bool, silence_s: float) -> None:
        """silence_s: how long the receiver may take nothing of what waits for it; more by what SLOWEST needs."""
        self._attempt = attempt
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._moved = 0.0  # when the receiver took something, or the first of what waits now began to
        self._waiting_bytes = 0
        self._on_device = on_device
        self._number = 0
        self._reading: set[Operation] = set()  # UCX reads payloads for these
        self._unacknowledged: set[int] = set()
        self._ending: asyncio.Task[None] | None = None
        self._given_up = False
        self._notifier = Notifier()
        self._stop = attempt.receive(bytearray(8), Kind.STOP)
        self._stop.add_done_callback(lambda _: self._notifier.notify())

    async def send(self, payload: Payload) -> None:
        """As `PayloadSender.send` says. Raises FrameError where the payload lies where it cannot be sent from."""
        self._check(payload)
        number = self._number
        self._number += 1
        if not self._waiting_bytes:
            self._moved = self._loop.time()
        self._waiting_bytes += payload.nbytes
        try:
            await self._send(payload, number)
        finally:
            self._waiting_bytes -= payload.nbytes
        self._moved = self._loop.time()

    async def _send(self, payload: Payload, number: int) -> None:
        awaited = [self._read(payload, number)] if payload.nbytes else []
        arrived = self._acknowledgement(number) if payload.nbytes < ACKNOWLEDGED_BELOW else None
        while not self._given_up and (left := [each for each in awaited if not each.done()]):
            await self._wait(left)
        if self._ending is None and all(each.done() and each.exception() is None for each in awaited):
            self._attempt.send(payload.nbytes.to_bytes(8, "little"), Kind.SIZE, number)
        if arrived is not None:
            awaited.append(arrived)
            while not arrived.done() and not self._stop.done():
                await self._wait({arrived})
        unwanted = arrived is None and self._stop.done()  # the receiver ended before it could have taken the payload
        failed = [each.exception() for each in awaited if each.done()]
        if self._ending is not None or unwanted or len(failed) < len(awaited) or any(failed):
            reason = "the sender was closed" if self._ending is not None else f"the receiver is gone {failed}"
            raise TransferAbortedError(f"payload {number} was not sent: {reason}")

    async def _wait(self, pending: Collection[Operation]) -> None:
        """Wait for news. Where the receiver has taken nothing for too long, close the sender and raise."""
        until = self._moved + self._silence_s + self._waiting_bytes / SLOWEST
        try:
            async with asyncio.timeout_at(until):
                await self._notifier.wait(pending)
        except TimeoutError:
            if self._moved + self._silence_s + self._waiting_bytes / SLOWEST > self._loop.time():
                return  # it has taken another one meanwhile
            await self.aclose()
            raise TransferAbortedError(
                f"the receiver took nothing of {self._waiting_bytes} bytes for {self._silence_s:g} s and longer"
            ) from None

    async def aclose(self) -> None:
        """As `PayloadSender.aclose` says, within a grace.

        A peer that still answers gives up what it has not begun to read, and finishes the rest. One that stands still
        may read on when it is woken: nothing in UCX forbids that to a process of the same host, and an endpoint that is
        closed in the middle of a payload over tcp can end this process once its peer wakes (decision 0016). The memory
        is held until then, and what is read of it is thrown away.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        reading = set(self._reading)
        if self._attempt.endpoint.alive:
            given_up = bool(reading or self._unacknowledged)
            self._attempt.send((self._number << 1 | given_up).to_bytes(8, "little"), Kind.END)
        for number in self._unacknowledged:
            self._attempt.end(Kind.ACK, number)
        if reading:
            _, reading = await asyncio.wait(reading, timeout=self._attempt.grace_s)
        if reading:
            logger.warning("a receiver stands still; %d payloads are held until it goes on or is gone", len(reading))
        self._given_up = True
        self._notifier.notify()
        self._attempt.leave(self._linger)

    async def _linger(self) -> None:
        """Wait for the receiver's STOP, which is its last message, so that nothing is left over."""
        if not self._stop.done():
            await asyncio.wait({self._stop}, timeout=LINGER_S)
        if not self._stop.done():
            self._attempt.end(Kind.STOP)
        await self._attempt.sweep(Kind.STOP)

    def _check(self, payload: Payload) -> None:
        if self._ending is not None or self._stop.done() or not self._attempt.endpoint.alive:
            reason = "the sender is closed" if self._ending is not None else "the receiver is gone"
            raise TransferAbortedError(f"payload {self._number} was not sent: {reason}")
        if self._number == PAYLOADS:
            raise FrameError(f"an attempt has at most {PAYLOADS} payloads; raise the receiver's --transfer-memory-mib")
        if isinstance(payload, torch.Tensor):
            if not payload.is_cuda or not self._on_device:
                raise FrameError(f"a tensor on {payload.device} cannot leave: UCX needs CUDA at both ends, or bytes")
            if payload.dtype != torch.uint8 or not payload.is_contiguous():
                raise FrameError(f"a payload of {payload.dtype}, shape {tuple(payload.shape)}, is not contiguous bytes")
        elif not payload.c_contiguous:
            raise FrameError(f"a payload of {payload.nbytes} bytes is not contiguous")

    def _acknowledgement(self, number: int) -> Operation:
        """The receiver's word that it has a payload."""
        arrived = self._attempt.receive(bytearray(8), Kind.ACK, number)
        self._unacknowledged.add(number)
        arrived.add_done_callback(lambda _: self._unacknowledged.discard(number))
        return arrived

    def _read(self, buffer: Any, number: int) -> Operation:
        operation = self._attempt.send(buffer, Kind.BODY, number)
        self._reading.add(operation)
        operation.add_done_callback(self._reading.discard)
        return operation
