"""The receiving end of one transfer."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor

from kvrail.codec.base import Codec
from kvrail.errors import FrameError, IncompatibleError, TransferAbortedError
from kvrail.kv.attempt import Attempt
from kvrail.kv.messages import Accepted, End, GivenUp, Offer, Working, pack, unpack
from kvrail.transfer.guard import Transfer
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.receiving import PageReceiver
from kvrail.transfer.silence import unless_silent
from kvrail.transfer.sizes import block_spec, first_recent_page
from kvrail.transport.base import Announcement, Peer, Transport

MAX_UNTAKEN = 1024
"""Control messages that may wait here. A sender has a few payloads under way, each announced once."""


class Receiving(Attempt):
    """Pages on their way in. Made by `KVEndpoint.receive`; `offer` goes to the sender, its messages to `deliver`."""

    def __init__(
        self,
        offer: Offer,
        host: str,
        codecs: Mapping[str, Codec],
        transports: Mapping[str, Transport],
        sink: PoolPages,
        executor: Executor,
        silence_s: float,
        on_coarse: Callable[[], None],
    ) -> None:
        super().__init__(on_coarse)
        self.offer = offer.pack()
        self._offer, self._host, self._codecs, self._transports = offer, host, codecs, transports
        self._sink, self._executor, self._silence_s = sink, executor, silence_s
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._frames = self._announced_bytes = 0
        self._start(self._run(), f"receive {offer.request}")

    def deliver(self, message: bytes) -> None:
        """Take the sender's next control message; they come in order. Any thread may call it.

        A message that is malformed or one too many fails the transfer, not the call.
        """
        self._loop.call_soon_threadsafe(self._deliver, bytes(message))

    def _deliver(self, message: bytes) -> None:
        waiting = self._messages.qsize()
        if waiting < MAX_UNTAKEN and not self._task.done():
            self._messages.put_nowait(message)
        elif waiting == MAX_UNTAKEN:
            self._messages.put_nowait(pack(GivenUp(f"{MAX_UNTAKEN} of its messages are not taken yet")))

    async def _run(self) -> None:
        accepted = unpack(await unless_silent(self._messages.get(), self._silence_s))
        if isinstance(accepted, GivenUp):
            raise TransferAbortedError(f"the sender gave up: {accepted.reason}")
        if not isinstance(accepted, Accepted):
            raise FrameError("the sender's first message does not accept the offer")
        codec, transport = self._codecs.get(accepted.codec), self._transports.get(accepted.transport)
        if codec is None or transport is None:
            raise IncompatibleError(
                f"the sender chose codec {accepted.codec!r} and transport {accepted.transport!r}; offered were"
                f" {', '.join(self._codecs)} and {', '.join(self._transports)}"
            )
        connecting = transport.receiver(Peer(accepted.address, self._host), self._offer.key)
        payload_receiver = await unless_silent(connecting, self._silence_s)
        try:
            self._receiver = self._receiver_of(codec)
            await self._receiver.run(self._announced, payload_receiver)
        finally:
            await payload_receiver.aclose()

    def _receiver_of(self, codec: Codec) -> PageReceiver:
        layout, num_pages = self._offer.layout, self._offer.num_pages
        recent = first_recent_page(num_pages * layout.page_size, layout.page_size)
        spec = block_spec(layout, num_pages)
        transfer = Transfer(self._offer.request, codec.name, codec.num_stages, spec, 0, recent, codec.parameters_id)
        return PageReceiver(transfer, codec, self._sink, self._executor, self.counts, self._silence_s)

    async def _announced(self) -> Announcement | None:
        """The next frame, or None at the end. Raises FrameError, TransferAbortedError."""
        while isinstance(message := unpack(await self._messages.get()), Working):
            self._receiver.not_silent()
        match message:
            case Announcement():
                self._frames += 1
                self._announced_bytes += message.payload_bytes
                return message
            case End():
                if (message.frames, message.payload_bytes) != (self._frames, self._announced_bytes):
                    raise FrameError(
                        f"the sender counts {message.frames} frames and {message.payload_bytes} bytes;"
                        f" {self._frames} and {self._announced_bytes} were announced"
                    )
                return None
            case GivenUp():
                raise TransferAbortedError(f"the sender gave up: {message.reason}")
        raise FrameError("the sender accepted twice")
