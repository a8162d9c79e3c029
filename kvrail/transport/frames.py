"""How frames travel from a prefill to a decode worker: four verbs, two roles.

The receiver **reserves**: it says what may land before anything is sent. The sender **sends** frames in order and then
either **commits** (that was all) or **aborts** (discard what came). Frames are opaque here: codec and wire vary apart.
A transport bounds what is in flight: `send` waits while the receiver is behind.

    receiver                          sender
    reserve(expectation)  ──────────▶ (told through the control plane)
    receive() ◀────────── frame ───── send(frame)
    receive() ◀────────── frame ───── send(frame)
    receive() → None ◀─────────────── commit()          or   TransferAbortedError ◀── abort(reason)

A transfer belongs to one call of a prefill worker, whose control replies travel beside it and overtake queued frames:

    call = client.prefill(request)    story(replies)
    call.reserve(expectation)
    await call.accepted() ◀────────── replies.accept(accepted)
    await call.first_token() ◀─────── replies.first_token(first_token)
    await call.receive() ◀─────────── await replies.send(seal(frame))

`PrefillReplies` (kvrail.transport.replies) is the sender and `PrefillCall` (kvrail.transport.call) the receiver; a
transport connects the two.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from kvrail.wire.replies import Reply, SealedFrame

Deliver = Callable[[Reply], Awaitable[None]]
"""Takes the next reply; waits while whoever takes it is behind."""

DEFAULT_QUEUED_BYTES = 48 << 20
"""Frames that one end of a transfer queues before it waits; a single larger frame is let through alone."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one transfer may bring; checked before memory is taken.

    max_frame_bytes bounds one frame with its header, max_total_bytes all frames of the transfer.
    """

    request_id: str
    max_frame_bytes: int
    max_total_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a sender says it sent, at commit, headers included; the receiver compares it with what came."""

    frame_count: int
    payload_bytes: int


class FrameSender(Protocol):
    """The prefill worker's end of one transfer."""

    async def send(self, frame: SealedFrame) -> None:
        """Queue one frame; waits while the receiver is behind. Raises TransferAbortedError once either end gave up."""

    async def drained(self) -> None:
        """Return once every frame queued so far has left this end. Raises TransferAbortedError like `send`."""

    async def commit(self) -> None:
        """Say that every frame was sent; nothing may follow. Returns once all of it has left this end."""

    async def abort(self, reason: str) -> None:
        """Give up without waiting; the receiver raises TransferAbortedError with `reason`."""


class FrameReceiver(Protocol):
    """The decode worker's end of one transfer."""

    def reserve(self, expectation: Expectation) -> None:
        """Admit one transfer; before this, a frame that arrives is refused."""

    async def receive(self) -> memoryview | None:
        """Take the next frame in order, or None after a commit whose summary matches what came.

        Raises FrameError where a frame breaks the expectation or the summary does not match, TransferAbortedError where
        the sender gave up, WorkerUnavailableError where it was lost. Frames not taken by then are discarded.
        """

    async def abort(self, reason: str) -> None:
        """Stop receiving without waiting; the sender's next call raises TransferAbortedError."""
