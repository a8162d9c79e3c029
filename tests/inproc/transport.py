"""The transport for two ends in one process and one event loop: payloads are handed over by reference.

One object serves both ends, and any number of workers. Nothing is copied: a region is the sender's own memory, so
`send` returns, is cancelled or fails only once the receiver has released it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import torch

from kvrail.errors import FrameError, TransferAbortedError, WorkerUnavailableError
from kvrail.runtime.waiting import settled
from kvrail.transport.base import Payload, Peer


class LentRegion:
    """A sender's memory in the receiver's hands."""

    crossing_s = 0.0

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._loop = asyncio.get_running_loop()
        self.returned: asyncio.Future[None] = self._loop.create_future()

    @property
    def payload(self) -> Payload:
        """What was sent, itself."""
        return self._payload

    def release(self) -> None:
        """Let `send` return; a second call does nothing. Any thread may call it."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self._return()
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: no sender waits any more
                self._loop.call_soon_threadsafe(self._return)

    def _return(self) -> None:
        if not self.returned.done():
            self.returned.set_result(None)


class _Attempt:
    """Where the two ends of one attempt meet: offers of the sender, wants of the receiver, the k-th with the k-th."""

    def __init__(self) -> None:
        self.over: str = ""
        self.lent: set[asyncio.Future[None]] = set()
        self._offers: deque[LentRegion] = deque()
        self._wants: deque[tuple[int, bool, asyncio.Future[LentRegion]]] = deque()

    def offer(self, payload: Payload) -> LentRegion:
        self.check()
        region = LentRegion(payload)
        self._offers.append(region)
        self._match()
        return region

    def want(self, size: int, on_device: bool) -> asyncio.Future[LentRegion]:
        self.check()
        want: asyncio.Future[LentRegion] = asyncio.get_running_loop().create_future()
        self._wants.append((size, on_device, want))
        self._match()
        return want

    def check(self) -> None:
        if self.over:
            raise TransferAbortedError(self.over)

    def end(self, why: str) -> None:
        """End the attempt for both ends; regions that were handed over stay with the receiver."""
        self.over = self.over or why
        for region in self._offers:
            region.returned.set_exception(TransferAbortedError(self.over))
            region.returned.exception()  # its sender raises it, unless that was cancelled
        for _, _, want in self._wants:
            if not want.done():
                want.set_exception(TransferAbortedError(self.over))
                want.exception()
        self._offers.clear()
        self._wants.clear()

    def _match(self) -> None:
        while self._offers and self._wants:
            region, (size, on_device, want) = self._offers[0], self._wants[0]
            payload = region.payload
            device = isinstance(payload, torch.Tensor) and payload.is_cuda
            length = payload.nbytes
            if length != size or device != on_device:
                want.set_exception(
                    FrameError(
                        f"a payload of {length} bytes{' on a device' if device else ''} came where {size}"
                        f"{' on a device' if on_device else ''} were announced; the sender is at fault"
                    )
                )
                self._wants.popleft()
                self.end("the payload is not the one that was announced")
                return
            self._offers.popleft()
            self._wants.popleft()
            self.lent.add(region.returned)
            region.returned.add_done_callback(self.lent.discard)
            want.set_result(region)


class InprocSender:
    """The sending end of one attempt."""

    def __init__(self, attempt: _Attempt, forget: Callable[[], None]) -> None:
        self._attempt = attempt
        self._forget = forget

    async def send(self, payload: Payload) -> None:
        """Hand the next payload over; returns once the receiver has released it.

        Cancelled while the receiver holds it, it ends the attempt and still waits for the release.
        Raises TransferAbortedError where either end gave up.
        """
        region = self._attempt.offer(payload)
        try:
            await asyncio.wait((region.returned,))
        except asyncio.CancelledError:
            self._attempt.end("the sender was cancelled")
            await settled(region.returned)
            raise
        region.returned.result()

    async def aclose(self) -> None:
        """Give up what is under way; waits for payloads that the receiver still holds."""
        self._forget()
        self._attempt.end("the sender gave up")
        await settled(*self._attempt.lent)


class InprocReceiver:
    """The receiving end of one attempt."""

    def __init__(self, attempt: _Attempt) -> None:
        self._attempt = attempt

    async def receive(self, size: int, *, on_device: bool) -> LentRegion:
        """Take the next payload, of `size` bytes. Cancelled, it ends the attempt.

        Raises FrameError where another lies there, TransferAbortedError where either end gave up.
        """
        want = self._attempt.want(size, on_device)
        try:
            await asyncio.wait((want,))
        except asyncio.CancelledError:
            if want.done() and want.exception() is None:
                want.result().release()
            self._attempt.end("the receiver was cancelled")
            raise
        return want.result()

    async def aclose(self) -> None:
        """Give up what is under way; regions that `receive` returned stay valid until they are released."""
        self._attempt.end("the receiver gave up")


class InprocTransport:
    """Joins the two ends of each attempt by its key. Belongs to one event loop."""

    def __init__(self) -> None:
        self._attempts: dict[int, _Attempt] = {}

    @property
    def name(self) -> str:
        """`inproc`."""
        return "inproc"

    @property
    def address(self) -> bytes:
        """Empty: both ends have this object."""
        return b""

    @property
    def on_device(self) -> bool:
        """Where there is a device: payloads are references, wherever they lie."""
        return torch.cuda.is_available()

    async def sender(self, peer: Peer, key: int) -> InprocSender:
        """The sending end of attempt `key`. Raises TransferAbortedError where the key is in use."""
        if key in self._attempts:
            raise TransferAbortedError("the attempt's key is in use; the receiver draws a new one for each attempt")
        attempt = self._attempts[key] = _Attempt()
        return InprocSender(attempt, lambda: self._forget(key, attempt))

    async def receiver(self, peer: Peer, key: int) -> InprocReceiver:
        """The receiving end of attempt `key`. Raises WorkerUnavailableError where its sender is not there, or taken."""
        attempt = self._attempts.pop(key, None)
        if attempt is None:
            raise WorkerUnavailableError("no sender in this process waits for the attempt's key")
        return InprocReceiver(attempt)

    async def aclose(self) -> None:
        """End what is left, for both ends."""
        for attempt in self._attempts.values():
            attempt.end("the transport was closed")
        self._attempts.clear()

    def _forget(self, key: int, attempt: _Attempt) -> None:
        if self._attempts.get(key) is attempt:
            del self._attempts[key]
