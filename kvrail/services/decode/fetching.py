"""Where a prompt's KV comes from: the first prefill worker that can send it, else this worker's own engine."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Protocol

from kvrail.codec.base import Codec
from kvrail.config.settings import DecodeSettings
from kvrail.engine.request.events import Admitted
from kvrail.engine.request.requests import EngineRequest
from kvrail.errors import DeadlineError, InvalidRequestError, KvrailError, OverloadedError
from kvrail.rpc.prefill.client import PrefillClient
from kvrail.runtime.tuning import compute_with
from kvrail.services.decode.choice import Chooser
from kvrail.services.decode.fallback import LOCAL_FALLBACK_TOKENS, LocalFallbacks
from kvrail.services.decode.local import LocalPrefill
from kvrail.services.decode.prefill_workers import AllowedWorkers, Asked, Breakers
from kvrail.services.decode.progress import Progress, Received
from kvrail.services.decode.transfer import Fetch
from kvrail.worker.budgets import helping_tokens
from kvrail.worker.carriers import Carriers
from kvrail.worker.codecs import AUTO, WITHOUT_CODE, CodecChoiceError, Codecs
from kvrail.worker.process import Worker

logger = logging.getLogger("kvrail.decode")

DECODER_THREADS = 4
AVOIDED_S = 300.0
"""So long a transport by which nothing came from a worker is not offered to it, where there is another."""

HEARD_S = 1.0
"""So long a request that has come to its end waits for that of its prefill call, which comes within a step or never."""


class PrefillWorkers(Protocol):
    """How to reach prefill workers (kvrail.services.decode.prefill_workers; in one process, tests give their own)."""

    def client(self, address: str) -> PrefillClient:
        """A client of the worker at `address`."""
        ...


class Fetcher:
    """Fetches prompts' KV for one decode worker. Belongs to one event loop.

    asked_codec: a codec's name, or AUTO; first_codec: what AUTO takes as long as it knows nothing of a link. It is
    usable, as plain bytes are.
    """

    def __init__(
        self,
        worker: Worker,
        settings: DecodeSettings,
        codecs: Codecs,
        carriers: Carriers,
        asked_codec: str,
        first_codec: str,
        prefill_workers: PrefillWorkers,
    ) -> None:
        self._worker = worker
        self._silence_s = settings.transfer_timeout_s
        self._codecs = codecs
        self._carriers = carriers
        self._asked_codec = asked_codec
        self._decoders = ThreadPoolExecutor(
            DECODER_THREADS, thread_name_prefix="decode", initializer=compute_with, initargs=(1,)
        )
        self._prefill_workers = prefill_workers
        self._allowed = AllowedWorkers(settings.allowed_prefill_workers)
        self._breakers = Breakers()
        self._local = LocalFallbacks(LOCAL_FALLBACK_TOKENS)
        self._avoided: dict[tuple[str, str], float] = {}  # until when, by worker and transport
        self._bytes_a_token = worker.loaded.layout.page_bytes / worker.loaded.layout.page_size
        self._here = LocalPrefill(
            settings.local_prefill_tokens, lambda: worker.engine.pace.prefill, helping_tokens(settings)
        )
        self._chooser = Chooser(worker.transfers, settings.max_drafts, first_codec)

    def codec_for(self, asked: str) -> str:
        """Name of the codec of a request that asked for this one, or for none; or AUTO.

        Raises InvalidRequestError where it cannot be had.
        """
        try:
            name = asked or self._asked_codec
            return AUTO if name == AUTO else self._codecs.get(name).name
        except CodecChoiceError as error:
            raise InvalidRequestError(str(error), param="codec") from None

    async def may_ask(self, workers: Sequence[str], instances: Sequence[int]) -> list[Asked]:
        """Those of `workers`, host:port each, that the operator lets requests name; instances: of each, or none."""
        known = dict(zip(workers, instances, strict=False))
        return [Asked(address, known.get(address, 0)) for address in await self._allowed.of(workers)]

    def cache_space(self, codec: str) -> str:
        """Where the pages of a request of this codec, or AUTO, are shared: those that lost bits by themselves."""
        return "" if codec == AUTO or self._codecs.get(codec).exact else codec

    async def measure_codecs(self) -> None:
        """Find out what each exact codec costs here, one after the other, beside the requests; then AUTO can choose."""
        for name in self._codecs.exact:
            try:
                self._chooser.costs[name] = await self._codecs.measured(
                    name, self._worker.loaded, on_device=self._carriers.on_device
                )
            except CodecChoiceError as error:
                logger.warning("codec %s leaves one out: %s", AUTO, error)

    def local_tokens(self) -> int:
        """Missing tokens of a prompt up to which this worker computes them by itself now."""
        return self._here.tokens(self._worker.engine.status().running)

    def fetch_s(self) -> float:
        """Seconds in which the KV of a token comes here, from the mean of all links; 0 where none was measured."""
        return self._bytes_a_token * self._chooser.mean_link_s()

    def learn(self, progress: Progress) -> None:
        """Measure a request that has come to its end."""
        if (share := progress.hidden_share()) is not None:
            self._worker.transfers.hidden_share.observe(share)
        if (fetched := progress.fetched_s()) is not None:
            self._here.fetched(len(progress.request.prompt_ids) - progress.cached_tokens, fetched)
        self._chooser.observe_steps(*progress.steps_after())
        self._chooser.observe_drafts(progress.drafts.proposed, progress.drafts.accepted)

    async def fetch(
        self,
        workers: Sequence[Asked],
        codec_name: str,
        admitted: Admitted,
        progress: Progress,
        time_remaining: Callable[[], float | None],
        refuse: Callable[[KvrailError], None],
    ) -> None:
        """Have the missing pages of an admitted request filled by the first of `workers` that can.

        Whatever goes wrong on the way, the engine computes what is missing in the end; `refuse` hears where it has too
        much of that to do.
        """
        asked, metrics = progress.request, self._worker.transfers
        outcome = "aborted"
        try:
            if await self._fetch(workers, codec_name, admitted, progress, time_remaining):
                return
            outcome = "failed"
        except Exception:
            outcome = "failed"
            logger.exception("fetching KV failed")
        finally:
            metrics.transfers["received", "committed" if progress.committed else outcome].inc()
        if progress.committed:
            return
        try:
            self._local.take(asked.request_id, len(asked.prompt_ids) - admitted.cached_tokens)
        except OverloadedError as error:
            metrics.fallbacks["refused"].inc()
            refuse(error)
            return
        metrics.fallbacks["local"].inc()
        logger.warning("no prefill worker could be used; the prompt is computed here")
        progress.falls_back = True
        progress.prefill_worker, progress.received = "", Received()
        self._worker.engine.compute_here(asked.request_id)

    async def leave(self, fetching: asyncio.Task[None], progress: Progress) -> None:
        """End the fetching of a request that has come to its end; a call whose pages all came may end by itself."""
        if progress.asked is not None:
            breaker, began = progress.asked
            breaker.succeeded(began)
        if progress.committed:
            await self.heard(fetching)
        fetching.cancel()
        await asyncio.wait([fetching])
        self.computed(progress)

    async def heard(self, fetching: asyncio.Task[None]) -> None:
        """Wait for the end of a call whose pages all came, but not for a worker that is lost."""
        await asyncio.wait([fetching], timeout=HEARD_S)

    def recomputed(self, progress: Progress) -> None:
        """The engine computes a prompt once more: the KV that it had gave no finite logits."""
        source = f"prefill worker {progress.prefill_worker}" if progress.prefill_worker else "the prefix cache"
        logger.warning("KV from %s gives no finite logits; the prompt is computed here, once more", source)
        if progress.asked is not None:
            breaker, began = progress.asked
            breaker.failed(began)
            progress.asked = None

    def computed(self, progress: Progress) -> None:
        """A prompt that fell back is computed, or nobody waits for it any more."""
        progress.falls_back = False
        self._local.over(progress.request.request_id)

    async def _fetch(
        self,
        workers: Sequence[Asked],
        codec_name: str,
        admitted: Admitted,
        progress: Progress,
        time_remaining: Callable[[], float | None],
    ) -> bool:
        """Whether a worker has filled the pages, or nobody asks for them any more; then nothing writes them."""
        asked, engine, metrics = progress.request, self._worker.engine, self._worker.transfers
        codecs = self._offer(codec_name, workers, asked, admitted, progress)
        lease = engine.claim_lease(asked.request_id)
        if lease is None:
            return True  # dropped meanwhile: nobody asks for its pages any more
        try:
            fetch = Fetch(
                self._worker,
                self._carriers,
                self._decoders,
                asked,
                admitted,
                lease,
                codecs,
                progress.timeline,
                progress.spans,
                {} if progress.trace is None else progress.trace.context,
                self._silence_s,
            )
            for number, worker in enumerate(workers):
                if number:
                    metrics.fallbacks["alternate"].inc()
                if await self._fetch_from(worker, fetch, progress, time_remaining):
                    return True
                if fetch.drafting:  # the next transfer writes the same pages
                    engine.drop_drafts(asked.request_id)
            return False
        finally:
            engine.release_lease(lease)

    async def _fetch_from(
        self, worker: Asked, fetch: Fetch, progress: Progress, time_remaining: Callable[[], float | None]
    ) -> bool:
        """Whether one worker has filled the pages."""
        address, breaker = worker.address, self._breakers.of(worker)
        if not breaker.allows:
            failed, pause_s = breaker.failures, breaker.pause_s
            logger.info("prefill worker %s failed %d requests in a row; not asked for %.1f s", address, failed, pause_s)
            return False
        client, link = self._prefill_workers.client(address), self._chooser.link_bytes_per_s(address)
        now = monotonic()
        avoided = [name for (peer, name), until in self._avoided.items() if peer == address and until > now]
        began = breaker.begin()

        def committed() -> None:
            progress.asked = breaker, began
            self._commit(address, fetch, progress)

        received = Received()
        progress.prefill_worker, progress.received = address, received
        try:
            await fetch.fetch(client, received, time_remaining(), link, committed, avoided)
        except KvrailError as error:  # whatever it is, another worker or this one can compute the prompt
            if progress.committed:
                logger.warning("the way from prefill worker %s could not be closed: %s", address, error)
                return True
            logger.warning("prefill worker %s failed: %s", address, error)
            if not isinstance(error, OverloadedError | DeadlineError):
                breaker.failed(began)
            if received.transport and not received.payload_bytes and len(self._carriers.all) > 1:
                # Agreed upon, and nothing came: perhaps no way leads there.
                self._avoided[address, received.transport] = now + AVOIDED_S
            return False
        finally:
            breaker.left(began)
            self._chooser.observe_link(address, fetch.crossing)
        return True

    def _commit(self, address: str, fetch: Fetch, progress: Progress) -> None:
        """A worker has filled the pages: the engine goes on with them at once."""
        metrics, received = self._worker.transfers, progress.received
        self._worker.engine.receive_kv(progress.request.request_id)
        progress.committed = True
        progress.promise.received(address, received.numerics)
        if (exposed := progress.exposed_s()) is not None:
            metrics.exposed_seconds.observe(exposed)
        if received.lossy:
            metrics.lossy_requests.inc()
        if received.codec != progress.asked_codec:
            metrics.codec_substituted(progress.asked_codec)

    def _offer(
        self, name: str, workers: Sequence[Asked], asked: EngineRequest, admitted: Admitted, progress: Progress
    ) -> list[Codec]:
        """What a prefill worker may take, best first: codec `name`, for AUTO what suits the missing KV and the link.

        Behind it come those that serve where that one is not compiled there; where it is not compiled here, before it.
        """
        codecs, layout, address = self._codecs, self._worker.loaded.layout, workers[0].address
        pages = layout.pages_for(len(asked.prompt_ids)) - admitted.cached_tokens // layout.page_size
        raw_bytes = pages * layout.page_bytes
        if name == AUTO:
            choice = self._chooser.choose(address, raw_bytes)
            name, progress.codec_reason = choice.codec, choice.sentence
        others = [self._chooser.meanwhile(address, raw_bytes, codecs.usable), WITHOUT_CODE]
        obstacle = codecs.ask_for(name)
        progress.asked_codec = name
        progress.substituted = f"codec {name} " + (
            f"{obstacle} on the decode worker" if obstacle else "is not compiled on the prefill worker yet"
        )
        return [codecs.get(each) for each in dict.fromkeys([*others, name] if obstacle else [name, *others])]
