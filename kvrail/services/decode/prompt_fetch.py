"""One prompt's KV: from the first prefill worker that can send it, else from this worker's own engine."""

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic

from kvrail.engine.aio import EngineEvents
from kvrail.engine.request.events import Admitted, Failed
from kvrail.errors import DeadlineError, KvrailError, OverloadedError
from kvrail.runtime.breaker import Breaker
from kvrail.runtime.logs import exemplar
from kvrail.runtime.waiting import settled
from kvrail.services.decode.fetch_attempt import FetchAttempt
from kvrail.services.decode.fetcher import Fetcher
from kvrail.services.decode.prefill_workers import PrefillTarget
from kvrail.services.decode.progress import Progress, Received

logger = logging.getLogger("kvrail.decode")

CALL_END_S = 1.0
"""A request at its end waits for the end of its prefill call for this long; that comes within a step or never."""


class PromptFetch:
    """Has the missing pages of one request filled, whatever fails on the way.

    targets: prefill workers, in the order in which they are asked. codec: a name, or AUTO. until: the request's
    deadline on time.monotonic, if it has one. `begin` starts it, `leave` ends it; both on one event loop.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        progress: Progress,
        targets: Sequence[PrefillTarget],
        codec: str,
        until: float | None,
    ) -> None:
        self._fetcher, self._progress, self._targets, self._codec = fetcher, progress, targets, codec
        self._until = until
        self._request = progress.request
        self._access, self._metrics = fetcher.parts.access, fetcher.parts.meters.transfers
        self._task: asyncio.Task[None] | None = None
        self._source: tuple[Breaker, float] | None = None  # of the worker whose KV is here, and when it was asked
        self.computing_here = False  # as no prefill worker could

    def begin(self, admitted: Admitted, events: EngineEvents) -> None:
        """The request has its pages. If too many prompts fall back to this worker, `events` ends with the reason."""
        self._task = asyncio.create_task(self._run(admitted, events))

    async def call_ended(self) -> None:
        """Wait for the end of a call whose pages have all come, but not for a worker that is lost."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CALL_END_S)

    def recomputed(self) -> None:
        """The engine computes the prompt once more: the KV that it had gave no finite logits."""
        worker = self._progress.prefill_worker
        source = f"prefill worker {worker}" if worker else "the prefix cache"
        logger.warning("KV from %s gives no finite logits; the prompt is computed here, once more", source)
        if self._source is not None:
            breaker, began = self._source
            breaker.failed(began)
            self._source = None

    def computed(self) -> None:
        """The prompt is computed, if it was to be computed here."""
        if self.computing_here:
            self.computing_here = False
            self._fetcher.fallbacks.over(self._request.request_id)

    async def leave(self) -> None:
        """The request has come to its end. A call whose pages have all come may end by itself."""
        if self._task is None:
            return
        if self._source is not None:
            breaker, began = self._source
            breaker.succeeded(began)
        try:
            if self._progress.committed:
                await self.call_ended()
        finally:
            self._task.cancel()
            try:
                await settled(self._task)
            finally:
                self.computed()

    async def _run(self, admitted: Admitted, events: EngineEvents) -> None:
        """Have the workers asked, one after the other. When this returns, none of them writes the pages."""
        request, layout, engine = self._request, self._access.layout, self._access.engine
        pages = layout.pages_for(len(request.prompt_ids)) - admitted.cached_tokens // layout.page_size
        outcome, lease = "aborted", None
        try:
            first = self._targets[0].address
            codecs = self._fetcher.offer(self._codec, first, pages * layout.page_bytes, self._progress)
            lease = engine.claim_lease(request.request_id)
            if lease is None:
                return  # dropped meanwhile: its pages are not needed any more
            for number, target in enumerate(self._targets):
                if number:
                    self._metrics.fallbacks["alternate"].inc()
                attempt = FetchAttempt(self._fetcher.parts, self._progress, lease, admitted.cached_tokens, codecs)
                if await self._from_worker(target, attempt):
                    return
            outcome = "failed"
        except Exception:
            outcome = "failed"
            logger.exception("fetching KV failed")
        finally:
            if lease is not None:
                engine.release_lease(lease)
            self._metrics.transfers["received", "committed" if self._progress.committed else outcome].inc()
        if not self._progress.committed:
            self._compute_here(admitted, events)

    async def _from_worker(self, target: PrefillTarget, attempt: FetchAttempt) -> bool:
        """Whether one worker has filled the pages."""
        fetcher, progress, received, address = self._fetcher, self._progress, attempt.received, target.address
        breaker = fetcher.breakers.of(target)
        if not breaker.allows:
            failed, pause_s = breaker.failures, breaker.pause_s
            logger.info("prefill worker %s failed %d requests in a row; not asked for %.1f s", address, failed, pause_s)
            return False
        timeout_s = None if self._until is None else self._until - monotonic()
        link = fetcher.chooser.link_bytes_per_s(address)
        progress.prefill_worker, progress.received = address, received
        began = breaker.begin()
        try:
            client, transports = fetcher.workers.client(address), fetcher.offered_transports(address)
            async with attempt.asked(client, timeout_s, link, transports):
                await attempt.receive()
                self._source = breaker, began
                self._commit(address)
                await attempt.follow_to_end()
        except KvrailError as error:  # whatever it is, another worker or this one can compute the prompt
            if progress.committed:
                logger.warning("the transfer from prefill worker %s could not be closed: %s", address, error)
                return True
            logger.warning("prefill worker %s failed: %s", address, error)
            if not isinstance(error, OverloadedError | DeadlineError):
                breaker.failed(began)
                if received.transport and not received.payload_bytes:
                    fetcher.avoid(address, received.transport)
            if attempt.drafting:  # the next transfer writes the same pages
                with self._access.engine.change() as requests:
                    requests.drop_drafts(self._request.request_id)
            return False
        finally:
            breaker.left(began)
            fetcher.chooser.observe_link(address, attempt.crossing)
        return True

    def _commit(self, address: str) -> None:
        """A worker has filled the pages: the engine goes on with them at once."""
        progress, received = self._progress, self._progress.received
        with self._access.engine.change() as requests:
            requests.receive_kv(self._request.request_id)
        progress.committed = True
        progress.invariance.received(address, received.numerics)
        if (exposed := progress.exposed_s()) is not None:
            self._metrics.exposed_seconds.observe(exposed, example=exemplar())
        if received.lossy:
            self._metrics.lossy_requests.inc()
        if received.codec != progress.asked_codec:
            self._metrics.codec_substituted(progress.asked_codec)

    def _compute_here(self, admitted: Admitted, events: EngineEvents) -> None:
        """No worker could: the engine computes what is missing, unless too many prompts wait for that."""
        request, progress = self._request, self._progress
        try:
            self._fetcher.fallbacks.take(request.request_id, len(request.prompt_ids) - admitted.cached_tokens)
        except OverloadedError as error:
            self._metrics.fallbacks["refused"].inc()
            events.put(Failed(error))
            return
        self._metrics.fallbacks["local"].inc()
        logger.warning("no prefill worker could be used; the prompt is computed here")
        self.computing_here = True
        progress.prefill_worker, progress.received = "", Received()
        with self._access.engine.change() as requests:
            requests.compute_here(request.request_id)
