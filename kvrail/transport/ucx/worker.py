"""One UCX context and worker, driven by UCXX's thread, which does not need the interpreter's lock.

A second thread waits for completions and hands them to the event loop, many at once. Sending and receiving only
enqueue: the driving thread calls UCX.
"""

import asyncio
import logging
import threading
from time import perf_counter
from typing import Any

import torch

from kvrail.errors import ConfigError
from kvrail.transport.ucx.library import Library, load
from kvrail.transport.ucx.settings import UcxSettings

logger = logging.getLogger(__name__)

_SLEEP_MS = 100
_DEVICE_SLEEP_MS = 1
"""UCX's thread looks around so often though nothing woke it. On a device a wakeup that cuda_ipc owed would cost much
more than a thousand looks per second."""
_NOTIFIER_NS = 500_000_000
_POOLED = 64
"""UCXX keeps 100 futures ready, and complains where more are begun before its thread has made others."""

Operation = asyncio.Future[None]
"""A send or receive under way: ends when UCX touches its buffer no more.

UCXX's own future, which it never releases if the request failed. So it is never awaited or asked for its result: that
would leave a traceback in the error, with whole frames and their buffers. Ask it for `exception`; never cancel it.
"""


class UcxWorker:
    """Belongs to one event loop."""

    def __init__(self, settings: UcxSettings, device: torch.device | None) -> None:
        self._library: Library = load()
        self._loop = asyncio.get_running_loop()
        self.completed_s = 0.0  # when operations that end now were complete, however late the event loop hears of it
        self._operations: dict[Operation, tuple[Any, Any]] = {}
        self._begun = 0
        api = self._library.api
        config = settings.config(on_device=device is not None)
        if device is not None:
            with torch.cuda.device(device):  # UCX looks for CUDA only where there is a context
                torch.cuda.current_stream(device).synchronize()
        try:
            self._context = api.UCXContext(config, feature_flags=(api.Feature.TAG, api.Feature.WAKEUP))
            self._worker = api.UCXWorker(self._context, enable_delayed_submission=True, enable_python_future=True)
        except (self._library.error, RuntimeError) as error:
            raise ConfigError(f"UCX does not start with {config}: {error}") from error
        if device is not None:
            self._worker.set_progress_thread_start_callback(_use_device, (device,))
        self._worker.populate_python_futures_pool()
        self._notifier = threading.Thread(target=self._notify, name="ucx-notifier", daemon=True)
        self._notifier.start()
        sleep_ms = _SLEEP_MS if device is None else _DEVICE_SLEEP_MS
        self._worker.start_progress_thread(polling_mode=settings.spin, epoll_timeout=sleep_ms)
        # Reaches this worker itself: an empty message through it ends a receive that no message has matched (`end`).
        self._own = self.connect(self.address, peer_failure=False)

    @property
    def address(self) -> bytes:
        """UCX's address of this worker."""
        address: bytes = self._worker.address.tobytes()
        return address

    @property
    def cuda(self) -> bool:
        """Whether UCX was built for CUDA and found a driver."""
        return bool(self._context.cuda_support)

    @property
    def errors(self) -> type[Exception]:
        """What operations raise where UCX fails them."""
        return self._library.error

    @property
    def truncated(self) -> type[Exception]:
        """What a receive raises where the message is longer than its buffer."""
        return self._library.truncated

    def connect(self, address: bytes, *, peer_failure: bool) -> Any:
        """An endpoint to the worker with that address; nothing travels yet. Raises one of `errors`."""
        there = self._library.api.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(there, endpoint_error_handling=peer_failure)

    def send(self, handle: Any, buffer: Any, tag: int) -> Operation:
        """Send bytes or a CUDA tensor."""
        return self._begin(handle.tag_send, buffer, tag)

    def receive(self, handle: Any, buffer: Any, tag: int) -> Operation:
        """Receive into a buffer; ends with an error, too, where the endpoint fails before a message has matched."""
        return self._begin(handle.tag_recv, buffer, tag)

    def end(self, tag: int) -> None:
        """End a receive that no message has matched, by one without content.

        UCXX cancels no single request, and closing the endpoint would end other attempts with the same peer. Where a
        message has matched already, the empty one is left over: `sweep` takes it.
        """
        self._begin(self._own.tag_send, bytearray(0), tag)

    def sweep(self, tag: int, mask: int) -> int:
        """Take messages that no receive has matched, of tags equal to `tag` under `mask`; returns their number.

        Nothing of them is kept. One that waits at its sender is received into no room, which UCX reports to both ends:
        the sender's operation ends, its buffer is free.
        """
        api, swept = self._library.api, 0
        while True:
            found = self._worker.tag_probe(api.UCXXTag(tag), api.UCXXTagMask(mask), remove=True)
            if not found.matched:
                return swept
            buffer = self._library.array(bytearray(0))
            self._watch(self._worker.tag_recv_with_handle(buffer, found), buffer)
            swept += 1

    async def aclose(self) -> None:
        """Stop both threads and give UCX back. Endpoints have been closed before."""
        # UCXX receives what is still unmatched, in full, before it lets a worker go: it would wait for a dead sender.
        self.sweep(0, 0)
        if self._operations:
            await asyncio.wait(self._operations, timeout=1)
        await asyncio.to_thread(self._stop)

    def _begin(self, call: Any, buffer: Any, tag: int) -> Operation:
        array = self._library.array(buffer)
        return self._watch(call(array, self._library.api.UCXXTag(tag)), array)

    def _watch(self, request: Any, buffer: Any) -> Operation:
        self._begun += 1
        if self._begun % _POOLED == 0:
            self._worker.populate_python_futures_pool()
        operation: Operation = request.future
        self._operations[operation] = request, buffer  # both live as long as UCX needs them
        operation.add_done_callback(self._forget)
        return operation

    def _forget(self, operation: Operation) -> None:
        del self._operations[operation]
        operation.exception()  # retrieved; a waiter asks the operation

    def _notify(self) -> None:
        """Hand completions to the event loop, until the worker is closed."""
        asyncio.set_event_loop(self._loop)  # UCXX makes its futures for the loop of the thread that fills their pool
        states = self._library.api.PythonRequestNotifierWaitState
        while True:
            self._worker.populate_python_futures_pool()
            state = self._worker.wait_request_notifier(period_ns=_NOTIFIER_NS)
            if state == states.Shutdown:
                return
            if state == states.Ready:
                try:
                    self._loop.call_soon_threadsafe(self._complete, perf_counter())
                except RuntimeError:  # the loop was closed before the transport
                    logger.warning("the event loop of transport ucx ended before its transport was closed")
                    return

    def _complete(self, completed_s: float) -> None:
        self.completed_s = completed_s
        self._worker.run_request_notifier()

    def _stop(self) -> None:
        self._worker.stop_request_notifier_thread()
        self._notifier.join()
        self._worker.stop_request_notifier_thread()  # where the first came between two waits, UCXX forgot it
        self._own.close_blocking(period=1_000_000_000, max_attempts=1)
        self._worker.stop_progress_thread()
        self._worker.clear_python_futures_pool()
        # UCX closes its port, and refuses new connections, when the last of these is gone.
        self._own = self._worker = self._context = None


def _use_device(device: torch.device) -> None:
    """UCX's thread copies from and to this device: its context is made current there."""
    torch.cuda.set_device(device)
    torch.cuda.current_stream(device).synchronize()
