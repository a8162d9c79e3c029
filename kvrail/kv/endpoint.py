"""One engine's end of all transfers: its pools, its codecs, its transports."""

import asyncio
import itertools
import operator
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvrail.codec import registry as codecs_by_name
from kvrail.codec.base import Codec
from kvrail.errors import ConfigError, IncompatibleError, TransferAbortedError, WorkerUnavailableError
from kvrail.kv.attempt import Attempt
from kvrail.kv.messages import MAX_REQUEST_BYTES, Offer, OfferedTransport
from kvrail.kv.pools import KVPools
from kvrail.kv.receiving import Receiving
from kvrail.kv.sending import Sending, whole
from kvrail.runtime.tuning import compute_with
from kvrail.transfer.pool_pages import PoolPages
from kvrail.transfer.route import Route, first_common
from kvrail.transfer.send_queue import DIRECT_SLOTS, SLOTS, SendQueue
from kvrail.transfer.streams import SideStream
from kvrail.transport import registry as transports_by_name
from kvrail.transport.base import Peer, Transport
from kvrail.transport.regions import host_pool
from kvrail.transport.registry import TransportOptions
from kvrail.values.layout import KVLayout

A = TypeVar("A", Sending, Receiving)

THREADS = 4
HELD_BYTES = 256 << 20
"""Encoded later stages that may wait in memory."""


class KVEndpoint:
    """Sends pages from and receives pages into one engine's pools. Belongs to one event loop; made by `start`."""

    def __init__(
        self,
        layout: KVLayout,
        pools: KVPools,
        codecs: Sequence[Codec],
        transports: Sequence[Transport],
        max_frame_bytes: int,
        silence_s: float,
        *,
        receives: bool,
        encrypt: bool,
    ) -> None:
        self._layout, self._pools, self._max_frame_bytes, self._silence_s = layout, pools, max_frame_bytes, silence_s
        self._receives, self._encrypt = receives, encrypt
        self._codecs = {codec.name: codec for codec in codecs}
        self._transports = {transport.name: transport for transport in transports}
        self._side = SideStream(pools.device)
        self._queues = {
            on_device: SendQueue(HELD_BYTES, slots=DIRECT_SLOTS if on_device else SLOTS) for on_device in (False, True)
        }
        self._orders = itertools.count()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv", initializer=compute_with, initargs=(1,))
        self._under_way: set[Attempt] = set()
        self._serving: set[int] = set()  # keys of offers
        self._loop, self._closed = asyncio.get_running_loop(), False

    @classmethod
    async def start(
        cls,
        layout: KVLayout,
        pools: KVPools,
        *,
        codecs: Sequence[str] = ("splitzip-channel", "raw"),
        transport: str = transports_by_name.AUTO,
        host: str = "",
        port: int = 0,
        encrypt: bool = False,
        receive_bytes: int = 256 << 20,
        max_frame_bytes: int = 64 << 20,
        silence_s: float = 60.0,
    ) -> "KVEndpoint":
        """Start an engine's end.

        codecs: names, the preferred first. transport: a name, or `auto`. host, port: where this end listens if it
        sends; without a host it only receives. encrypt: equal at both ends. receive_bytes: host memory (on CUDA, device
        memory as well) in which payloads land; 0: this end only sends. max_frame_bytes: most KV of a frame, before
        encoding. silence_s: longest silence of the other end. Raises ValueError for pools or codecs that do not fit the
        layout or cannot be, ConfigError for a transport that does not start.
        """
        pools.check(layout)
        if not codecs or not 0 <= port < 1 << 16:
            raise ValueError(f"codecs are {codecs}, port is {port}; name a codec, and a port below {1 << 16}")
        chosen = [_codec(name, layout) for name in ([codecs] if isinstance(codecs, str) else codecs)]
        least = 2 * max(max_frame_bytes, layout.page_bytes // layout.num_layers)  # a page of a layer is not divided
        if receive_bytes and receive_bytes < least:
            raise ValueError(f"receive_bytes is {receive_bytes}; give at least two frames, {least}")
        on_cuda = pools.device.type == "cuda"
        pool = host_pool(receive_bytes, pinned=on_cuda, patience_s=silence_s) if receive_bytes else None
        options = TransportOptions(pools.device, pool, host, port, encrypt, silence_s)

        def refusal(info: transports_by_name.TransportInfo) -> str:
            if not encrypt or info.encrypts:
                return ""
            if transport == transports_by_name.AUTO:
                return "it knows no encryption"
            raise ConfigError(f"transport {info.name!r} knows no encryption; use tcp")

        started, _ = await transports_by_name.start(transport, options, refusal)
        receives = bool(receive_bytes)
        return cls(layout, pools, chosen, started, max_frame_bytes, silence_s, receives=receives, encrypt=encrypt)

    def receive(
        self, request: str, pages: Sequence[int], *, host: str = "", on_coarse: Callable[[], None] = lambda: None
    ) -> Receiving:
        """Receive a request's KV into `pages` of the pools, in the request's order.

        host: by which the sender's host is reached. on_coarse: called once the first stage of every page is there, with
        codecs of several stages. The pages belong to the transfer until it is done or aborted. Raises ValueError for
        pages or a request's name that cannot be.
        """
        if not self._receives:
            raise ConfigError("this endpoint only sends; start it with receive_bytes above 0 to receive, too")
        if (size := len(request.encode())) > MAX_REQUEST_BYTES:
            raise ValueError(f"request {request[:32]!r}... has {size} bytes; at most {MAX_REQUEST_BYTES} are possible")
        sink = self._pages(pages)
        transports = tuple(
            OfferedTransport(name, each.address, each.on_device) for name, each in self._transports.items()
        )
        offer = Offer(
            request=request,
            key=secrets.randbits(64),
            layout=self._layout,
            num_pages=len(pages),
            codecs={name: codec.parameters_id for name, codec in self._codecs.items()},
            transports=transports,
            max_frame_bytes=self._max_frame_bytes,
            frame_layers=self._pools.frame_layers,
            encrypt=self._encrypt,
        )
        receiving = Receiving(
            offer, host, self._codecs, self._transports, sink, self._threads, self._silence_s, on_coarse
        )
        return self._follow(receiving)

    def send(
        self,
        offer: bytes,
        pages: Sequence[int],
        control: Callable[[bytes], None],
        *,
        host: str = "",
        complete: bool = True,
    ) -> Sending:
        """Send `pages` of the pools, in the request's order, as a receiver's offer asks.

        control: takes each control message, in order, for the receiver's `deliver`. host: by which the receiver's host
        is reached. complete: every page is complete now; otherwise call `ready` and, at the end, `finish`. The pages
        must stay as they are until the transfer is done or aborted. Raises FrameError for a malformed offer,
        IncompatibleError if the two ends have nothing in common.
        """
        source = self._pages(pages)
        wanted = Offer.unpack(offer)
        if wanted.key in self._serving:
            raise TransferAbortedError("this offer is served already; give each offer to `send` once")
        if wanted.layout != self._layout:
            raise IncompatibleError(f"the layouts differ: receiver {wanted.layout}, sender {self._layout}")
        if wanted.encrypt != self._encrypt:
            raise IncompatibleError(f"encrypt is {wanted.encrypt} at the receiver, {self._encrypt} here; use the same")
        if wanted.num_pages != len(pages):
            raise IncompatibleError(f"the receiver wants {wanted.num_pages} pages; {len(pages)} are to be sent")
        route = self._route(wanted, host)
        sending = Sending(
            wanted,
            route,
            min(self._max_frame_bytes, wanted.max_frame_bytes),
            self._pools.frame_layers or wanted.frame_layers,
            source,
            self._queues[route.on_device],
            next(self._orders),
            self._threads,
            control,
        )
        self._serving.add(wanted.key)
        sending.on_end(lambda: self._serving.discard(wanted.key))
        if complete:
            sending.ready(*whole(self._layout.num_layers, pages))
            sending.finish()
        return self._follow(sending)

    async def aclose(self) -> None:
        """Abort what is under way, and close the transports."""
        self._closed = True
        await asyncio.gather(*(each.abort() for each in self._under_way))
        await asyncio.gather(*(each.aclose() for each in self._transports.values()))
        self._threads.shutdown()

    def _route(self, wanted: Offer, host: str) -> Route:
        codec = self._codecs[first_common("codec", list(wanted.codecs), list(self._codecs))]
        if wanted.codecs[codec.name] != codec.parameters_id:
            raise IncompatibleError(f"parameters of codec {codec.name!r} differ; use the same codebook at both ends")
        offered = {each.name: each for each in wanted.transports}
        transport = self._transports[first_common("transport", list(offered), list(self._transports))]
        there = offered[transport.name]
        peer = Peer(there.address, host)
        return Route.to(peer, wanted.key, codec, transport, on_device=there.on_device)

    def _pages(self, pages: Sequence[int]) -> PoolPages:
        """Those pages for a new transfer; the caller's list may change afterwards."""
        if self._closed:
            raise WorkerUnavailableError("this endpoint is closed; start another one")
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this endpoint belongs to the event loop that it was started in; call it there")
        numbers = [operator.index(page) for page in pages]  # also of an array
        known = range(self._pools.num_pages)
        if not numbers or len({number for number in numbers if number in known}) < len(numbers):
            raise ValueError(f"pages must be distinct numbers below {len(known)}, at least one: {numbers}")
        return PoolPages(self._pools.blocks, self._side, numbers, len(numbers) * self._layout.page_size)

    def _follow(self, transfer: A) -> A:
        self._under_way.add(transfer)
        transfer.on_end(lambda: self._under_way.discard(transfer))
        return transfer


def _codec(name: str, layout: KVLayout) -> Codec:
    codec = codecs_by_name.get(name)
    if layout.dtype not in codec.dtypes:
        raise ValueError(
            f"codec {name!r} takes {', '.join(sorted(codec.dtypes))}, but the pages are {layout.dtype}; name other"
            " codecs, such as 'raw'"
        )
    return codec
