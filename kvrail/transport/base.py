"""How payloads of KV frames travel from a prefill to a decode worker: two roles, one plug for each transport.

Control and data are apart. The gRPC call of a prefill worker carries the handshake, the first token, the announcement
of each frame (its head, the size of its payload and where it lies), the end and errors. A **transport** moves the
payloads; it knows neither codec nor call. Each attempt at a transfer has a key of its own, drawn by the receiver, so
that nothing late can land in another attempt.

    receiver                                     sender
    request: transport's address, key ─────────▶ transport.sender(peer, key)
    transport.receiver(peer, key) ◀───────────── accepted: transport's address
    announced(head, size, on_device) ◀────────── announce, sender.send(payload)
    receiver.receive(size, on_device) → Region ◀═══ payload

The receiver checks a head before it takes memory for its payload. A region belongs to a pool of the receiving
transport, whose memory is registered once. It is written until `receive` returns, and goes back with `release` when its
payload has been decoded. A receiver that is behind takes no region, so the sender's `send` waits: that is the
backpressure.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

Payload = memoryview | torch.Tensor
"""Bytes, contiguous: in this process's memory, or uint8 [n] on a CUDA device."""

MAX_ADDRESS_BYTES = 4096
"""No transport's address is longer."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A frame whose payload leaves now: its head, which transports do not read, the payload's size and where it lies.

    on_device: the payload leaves from a CUDA device for a CUDA device.
    """

    head: bytes
    payload_bytes: int
    on_device: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """The transport at the other end: what it calls itself, and the host by which its gRPC port was reached, if any."""

    address: bytes
    host: str = ""


class Region(Protocol):
    """Where one payload has landed: part of a transport's pool, or in process the sender's own memory."""

    @property
    def payload(self) -> Payload:
        """The payload, exactly as long as was asked for. Valid until `release`."""
        ...

    @property
    def crossing_s(self) -> float:
        """Seconds in which the payload crossed, from its first byte here to its last; 0 where nothing crosses a link.

        What came before the payload is not in it: its computation, its encoding, payloads ahead of it.
        """
        ...

    def release(self) -> None:
        """Give the memory back; it is read no more. A second call does nothing. Any thread may call it."""
        ...


class PayloadSender(Protocol):
    """The sending end of one attempt. Belongs to one event loop."""

    async def send(self, payload: Payload) -> None:
        """Send the next payload: the k-th call of `send` meets the k-th of `receive`. Several may be under way.

        On a device it must be complete: work that writes it has finished, not merely been launched. Returns once the
        payload is read no more; whether it was taken for good, the receiver alone knows. Raises TransferAbortedError
        where the other end is known to be gone or `aclose` was called.
        """

    async def aclose(self) -> None:
        """Give up what is under way. When this returns, no payload is read any more."""


class PayloadReceiver(Protocol):
    """The receiving end of one attempt. Belongs to one event loop."""

    async def receive(self, size: int, *, on_device: bool) -> Region:
        """Receive the next payload, of exactly `size` bytes, into a region; waits until one is free.

        Several calls may be under way; they meet the sender's payloads in the order of the calls. Cancelled, or where
        it raises, no region is taken. Raises FrameError where the payload has another size or the pool could never
        hold it, TransferAbortedError where the sender is gone.
        """

    async def aclose(self) -> None:
        """Give up what is under way. When this returns, nothing that was sent with this key can be written anywhere.

        Regions that `receive` returned stay valid until they are released.
        """


class Transport(Protocol):
    """One transport of one worker, made at its start. Belongs to one event loop."""

    @property
    def name(self) -> str:
        """The transport's name in settings, handshakes and metrics."""
        ...

    @property
    def address(self) -> bytes:
        """How peers reach this end, at most MAX_ADDRESS_BYTES; the same as long as the worker lives."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether payloads can go from and to this worker's CUDA device without passing through the host."""
        ...

    async def sender(self, peer: Peer, key: int) -> PayloadSender:
        """The sending end of attempt `key` (64 bits, from the peer). Raises TransferAbortedError where it is gone."""

    async def receiver(self, peer: Peer, key: int) -> PayloadReceiver:
        """The receiving end of attempt `key`. Raises WorkerUnavailableError where the peer cannot be reached."""

    async def aclose(self) -> None:
        """Close everything; senders and receivers have been closed before."""
