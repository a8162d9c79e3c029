"""One generation: reserve pages, fetch or compute the prompt's KV, decode, report."""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext

import grpc
import grpc.aio

from kvrail.engine.request.events import Admitted, Finished, Output, Recomputed
from kvrail.engine.request.requests import EngineRequest, Resumed
from kvrail.grammar import Grammars
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.events_server import DecodeService, Write
from kvrail.runtime.drain import ActiveCalls
from kvrail.runtime.logs import bound_request_id
from kvrail.services.decode import trace
from kvrail.services.decode.fetcher import Fetcher
from kvrail.services.decode.invariance import InvarianceTracker
from kvrail.services.decode.prefill_workers import PrefillTarget
from kvrail.services.decode.progress import Progress
from kvrail.services.decode.prompt_fetch import PromptFetch
from kvrail.telemetry.moments import Timeline
from kvrail.telemetry.tracing import Tracing
from kvrail.wire.convert import check_request_id, check_workers, sampling_from_proto
from kvrail.wire.v1 import common_pb2, decode_pb2
from kvrail.worker.codecs import AUTO
from kvrail.worker.status import StatusReporter


class DecodeServicer(DecodeService):
    """Serves kvrail.v1.Decode."""

    def __init__(
        self,
        reporter: StatusReporter,
        fetcher: Fetcher,
        grammars: Grammars,
        calls: ActiveCalls,
        tracing: Tracing | None,
        withheld_codecs: Sequence[str],
    ) -> None:
        """calls: takes note of each. tracing: exports its spans. withheld_codecs: lossy, and cannot be asked for."""
        super().__init__()
        self._reporter = reporter
        self._fetcher = fetcher
        self._model, self._access = fetcher.parts.model, fetcher.parts.access
        self._grammars = grammars
        self._active = calls
        self._tracing = tracing
        self._withheld_codecs = withheld_codecs
        self._invariance = InvarianceTracker(self._model.numerics)
        self._calls = itertools.count(1)  # a request that is asked for again must not meet its first call

    @maps_errors
    async def GetStatus(
        self, request: common_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.WorkerStatus:
        """Report identity, limits and load."""
        status = self._reporter.report(request)
        status.codecs.append(AUTO)
        status.step_cost.fetch_each = self._fetcher.fetch_s()
        status.withheld_codecs.extend(self._withheld_codecs)
        return status

    async def generate(self, request: decode_pb2.GenerateRequest, write: Write, until: float | None) -> None:
        """Generate one request's output; when the client leaves, this is cancelled and everything returns."""
        with bound_request_id(request.request_id), self._active.track():
            self._model.check(request.model, request.model_fingerprint, request.kv_cache)
            check_request_id(request.request_id)
            check_workers(request.prefill_workers)
            codec = self._fetcher.codec_for(request.codec, exact=request.exact)
            instances = dict(zip(request.prefill_workers, request.prefill_instances, strict=False))
            workers = [
                PrefillTarget(address, instances.get(address, 0))
                for address in await self._fetcher.allowed.of(request.prefill_workers)
            ]
            engine = self._access.engine
            params = sampling_from_proto(request.sampling)
            asked = EngineRequest(
                request_id=f"{request.request_id}/{next(self._calls)}",
                prompt_ids=tuple(request.prompt_token_ids),
                params=params,
                # A prefill worker sends KV and no logits; where these are wanted, they are computed where they are. So
                # is the prompt of output that is resumed.
                remote=bool(workers) and params.prompt_logprobs is None and not request.resumed,
                local_tokens=self._fetcher.local.tokens(engine.status().running, engine.step_cost.prefill),
                resumed=tuple(Resumed(tuple(each.token_ids), each.ended) for each in request.resumed),
                provisional=True,  # for every client: when drafts are made is measured
                caller_id=request.request_id,
                cache_space=self._fetcher.cache_space(codec),
                client=request.client,
                grammar=await self._grammars.get(params.grammar, request.client),
                scored=request.scored_tokens,
                cache_salt=request.cache_salt,
            )
            timeline = Timeline()
            hop = trace.begin(self._tracing, request, timeline) if self._tracing else None
            progress = Progress(asked, self._invariance, request.provisional, request.trace, hop, timeline)
            with hop.following(lambda hop, error: trace.end(hop, progress, error)) if hop else nullcontext():
                fetch = PromptFetch(self._fetcher, progress, workers, codec, until)
                await self._follow(progress, fetch, write)

    async def _follow(self, progress: Progress, fetch: PromptFetch, write: Write) -> None:
        """Have the engine generate, and send the caller its output."""
        events = self._access.events.open(self._access.engine, progress.request)
        try:
            async for event in events:
                if isinstance(event, Finished) and progress.spans is not None:
                    await fetch.call_ended()  # it brings the prefill worker's spans
                reply = progress.take(event)
                if isinstance(event, Recomputed):
                    fetch.recomputed()
                if fetch.computing_here and isinstance(event, Output):
                    fetch.computed()
                if isinstance(event, Admitted) and event.awaits_kv:
                    fetch.begin(event, events)
                if reply is not None:
                    await write(reply)
            self._fetcher.learn(progress)
        finally:
            events.close()
            await fetch.leave()
