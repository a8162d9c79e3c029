"""What a worker serves, and what it reports of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrail.config.settings import WorkerSettings
from kvrail.engine.engine import Engine
from kvrail.engine.kv.prefix_events import Cursor
from kvrail.engine.model.loader import LoadedModel
from kvrail.errors import ModelNotFoundError, WorkerUnavailableError
from kvrail.rpc.report import report_of
from kvrail.runtime.drain import ActiveCalls
from kvrail.wire import PROTOCOL_VERSION
from kvrail.wire.convert import layout_to_proto
from kvrail.wire.v1 import common_pb2
from kvrail.worker.budgets import mixed_tokens
from kvrail.worker.device import device_now
from kvrail.worker.monitor import Monitor
from kvrail.worker.transports import in_clear

MAX_DIGESTS = 8192
"""Of pages in one status answer: 64 KiB."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name that requests ask for. numerics: see `Finding`. kv_cache: the form of its KV pages."""

    name: str
    loaded: LoadedModel
    numerics: str
    kv_cache: str

    def check(self, name: str, fingerprint: str, kv_cache: str = "") -> None:
        """Raise ModelNotFoundError for another model, WorkerUnavailableError for other weights or pages; "": any."""
        if name != self.name:
            raise ModelNotFoundError(f"model {name!r} is not served here; this worker has {self.name!r}")
        ours = self.loaded.fingerprint
        if fingerprint and fingerprint != ours:
            raise WorkerUnavailableError(
                f"this worker has model fingerprint {ours[:16]!r}, the request belongs to {fingerprint[:16]!r}; ask"
                " another worker"
            )
        if kv_cache not in ("", self.kv_cache):
            raise WorkerUnavailableError(
                f"this worker keeps KV pages as {self.kv_cache!r}, the request is for {kv_cache!r}; ask another worker"
            )


@dataclass(frozen=True, slots=True)
class StatusReporter:
    """Reports identity, limits and load.

    codecs: by name, the number of its parameters. transports: names, the best first. instance: of this start of the
    process.
    """

    settings: WorkerSettings
    model: ServedModel
    engine: Engine
    calls: ActiveCalls
    monitor: Monitor
    codecs: Mapping[str, int]
    transports: Sequence[str]
    instance: int

    def report(self, asked: common_pb2.StatusRequest) -> common_pb2.WorkerStatus:
        """The worker's status now, with the KV events that are asked for."""
        load, settings, loaded = self.engine.status(), self.settings, self.model.loaded
        counts = load.pages
        prefill, decode = self.engine.step_cost.prefill, self.engine.step_cost.decode
        return common_pb2.WorkerStatus(
            model=common_pb2.ModelInfo(
                name=self.model.name,
                fingerprint=loaded.fingerprint,
                vocab_size=loaded.vocab_size,
                max_model_len=loaded.max_model_len,
                numerics=self.model.numerics,
            ),
            layout=layout_to_proto(loaded.layout),
            protocol_version=PROTOCOL_VERSION,
            codecs=self.codecs,
            transports=self.transports,
            running=load.running,
            waiting=load.waiting,
            max_running=self.engine.max_running,
            max_waiting=settings.max_waiting,
            pages_total=counts.free + counts.used + counts.cached,
            pages_free=counts.free,
            pages_cached=counts.cached,
            draining=self.calls.draining or not load.healthy,
            instance=self.instance,
            codec_parameters=self.codecs,
            kv_events=self._kv_events(asked),
            step_cost=common_pb2.StepCost(
                prefill_base=prefill.base,
                prefill_each=prefill.each,
                decode_base=decode.base,
                decode_each=decode.each,
                prefill_full=self.engine.step_cost.full_prefill,
            ),
            max_batch_tokens=settings.max_batch_tokens,
            mixed_batch_tokens=mixed_tokens(settings),
            metrics_port=self.monitor.port,
            metrics_tls=settings.metrics_tls,
            report=report_of(self.monitor.registry, device_now(loaded.device)),
            roles=settings.roles,
            kv_cache=self.model.kv_cache,
            kv_in_clear=bool(in_clear(settings, self.transports)),
        )

    def _kv_events(self, asked: common_pb2.StatusRequest) -> common_pb2.KVEvents | None:
        if not asked.max_pages:
            return None
        cursor = Cursor(asked.stored_to, asked.removed_to)
        events = self.engine.kv_events(cursor, min(asked.max_pages, MAX_DIGESTS))
        return common_pb2.KVEvents(
            snapshot=events.snapshot,
            stored_to=events.cursor.stored,
            removed_to=events.cursor.removed,
            stored=events.stored,
            removed=events.removed,
            complete=events.complete,
        )
