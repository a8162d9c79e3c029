"""What all workers have in common: the model behind an engine."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvrail.config.settings import WorkerSettings
from kvrail.engine.aio import EventRouter
from kvrail.engine.engine import Engine
from kvrail.engine.model.loader import LoadedModel, WeightForms, load_model
from kvrail.engine.model.toolchain import check_toolchain
from kvrail.engine.request.events import Delivery, LayerListener
from kvrail.engine.request.requests import ModelLimits
from kvrail.engine.sampling.sampler import Sampler
from kvrail.engine.schedule.scheduler import Scheduler
from kvrail.engine.step.invariance import Finding
from kvrail.engine.step.runner import ModelRunner
from kvrail.errors import ConfigError
from kvrail.grammar import Grammars
from kvrail.runtime.drain import ActiveCalls
from kvrail.runtime.tuning import in_passing_thread
from kvrail.telemetry.making import show_worker
from kvrail.telemetry.series import Registry
from kvrail.telemetry.startup import Startup, State
from kvrail.telemetry.tracing import Tracing
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, MemoryMetrics, TransferMetrics
from kvrail.text import Tokenizer, load_tokenizer
from kvrail.transfer.streams import SideStream
from kvrail.worker.access import EngineAccess
from kvrail.worker.budgets import limits_of
from kvrail.worker.device import bytes_of, device_name
from kvrail.worker.kv_cache import describe, page_pool, pages_for
from kvrail.worker.monitor import Monitor
from kvrail.worker.observing import KVMeters
from kvrail.worker.status import ServedModel, StatusReporter

logger = logging.getLogger("kvrail.worker")

WARMING = "warming up"
WARMING_CUDA = "warming up: GPU kernels are compiled at the first start, minutes, and loaded at later ones"


@dataclass(frozen=True)
class Worker:
    """An engine and its surroundings; built once, before the first request.

    meters: what transfers and codecs count in. instance: of this start of the process.
    """

    settings: WorkerSettings
    model: ServedModel
    access: EngineAccess
    meters: KVMeters
    calls: ActiveCalls
    monitor: Monitor
    memory: MemoryMetrics | None
    grammars: Grammars
    tracing: Tracing | None
    instance: int = field(default_factory=lambda: secrets.randbits(64))

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.access.engine

    def reporter(self, codecs: Mapping[str, int], transports: Sequence[str]) -> StatusReporter:
        """What reports the worker's status; see there for the arguments."""
        return StatusReporter(
            self.settings, self.model, self.engine, self.calls, self.monitor, codecs, transports, self.instance
        )

    def measure(self) -> None:
        """Bring up to date what is measured at a scrape alone. Any thread may call it."""
        self.engine.report_load()
        if self.memory is not None:
            free, total = torch.cuda.mem_get_info(self.model.loaded.device)
            self.memory.show(free=free, total=total)

    def state(self) -> State:
        """Whether requests can be sent here, and if not, why."""
        if self.calls.draining:
            return "draining"
        return "serving" if self.engine.status().healthy else "broken"


def build_engine(
    settings: WorkerSettings,
    registry: Registry,
    startup: Startup,
    deliver: Callable[[Delivery], None],
    tokenizer: Tokenizer | None,
    *,
    listener: LayerListener | None = None,
    max_drafts: int = 0,
    weights: WeightForms | None = None,
) -> tuple[LoadedModel, ModelRunner, Engine]:
    """Load the model and build the engine, which is not started yet. Raises from kvrail.errors.

    deliver: see Engine. tokenizer: None where no text is made. weights: the forms in which they may be stored, and in
    which they are held; None: as safetensors have them. startup: takes each phase.
    """

    def load() -> tuple[LoadedModel, ModelRunner]:
        return _load(settings, weights or WeightForms(), startup)

    loaded, runner = in_passing_thread(load) if settings.device.startswith("cpu") else load()
    pool, closer = page_pool(settings, runner.cache)
    sampler = Sampler(loaded.vocab_size, loaded.device)
    sampler.warm_up()
    decodes = "decode" in settings.roles
    measured = EngineMetrics(registry, settings.model_name, receives=decodes, drafts=max_drafts > 0)
    measured.show_cache(
        page_size=settings.page_size,
        pages=runner.cache.num_pages,
        kv_dtype=settings.kv_dtype,
        prefix_cache=settings.prefix_cache,
        cache_bytes=runner.cache.bytes,
    )
    engine = Engine(
        runner,
        sampler,
        Scheduler(pool, limits_of(settings, loaded.vocab_size, runner.max_running)),
        ModelLimits(loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids),
        tokenizer,
        measured,
        deliver,
        listener,
        max_drafts,
        closer,
    )
    return loaded, runner, engine


def build_worker(
    settings: WorkerSettings,
    monitor: Monitor,
    *,
    side: SideStream | None = None,
    listener: LayerListener | None = None,
    max_drafts: int = 0,
    weights: WeightForms | None = None,
) -> Worker:
    """Build the engine and what surrounds it; called inside the loop that will serve. Raises from kvrail.errors.

    side: of its transfers; None: a new one.
    """
    tracing, name = Tracing.start(settings.otlp_endpoint, settings.table), settings.model_name
    registry = monitor.registry
    prefills, decodes = "prefill" in settings.roles, "decode" in settings.roles
    tokenizer, events = load_tokenizer(settings.model) if decodes else None, EventRouter(asyncio.get_running_loop())
    loaded, runner, engine = build_engine(
        settings,
        registry,
        monitor.startup,
        events.deliver,
        tokenizer,
        listener=listener,
        max_drafts=max_drafts,
        weights=weights,
    )
    _show_device(registry, settings, loaded)
    memory = None
    if loaded.device.type == "cuda":
        memory = MemoryMetrics(registry, name, weights=bytes_of(loaded.model), kv_cache=runner.cache.bytes)
    return Worker(
        settings=settings,
        model=ServedModel(name, loaded, runner.finding.numerics, settings.kv_cache),
        access=EngineAccess(engine, events, runner.cache, side or SideStream(loaded.device)),
        meters=KVMeters(
            TransferMetrics(registry, name, (), ("sent",) * prefills + ("received",) * decodes),
            CodecMetrics(registry, name, encodes=prefills, decodes=decodes),
        ),
        calls=ActiveCalls(),
        monitor=monitor,
        memory=memory,
        grammars=Grammars(lambda: tokenizer or load_tokenizer(settings.model), loaded.eos_token_ids, loaded.vocab_size),
        tracing=tracing,
    )


def _show_device(registry: Registry, settings: WorkerSettings, loaded: LoadedModel) -> None:
    """Show what the worker runs on and in which types."""
    cuda = loaded.device.type == "cuda"
    show_worker(
        registry,
        settings.model_name,
        role="both" if len(settings.roles) > 1 else settings.table,
        device=device_name(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        kv_cache=settings.kv_dtype if settings.kv_cache == "plain" else f"{settings.kv_dtype}, {settings.kv_cache}",
        torch=torch.__version__,
        cuda=(torch.version.cuda or "") if cuda else "",
    )


def _load(settings: WorkerSettings, weights: WeightForms, startup: Startup) -> tuple[LoadedModel, ModelRunner]:
    """The model and its page pool, compiled and captured where that is asked for."""
    startup.enter("load")
    if settings.device != "cpu":
        check_toolchain()
    loaded = load_model(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        page_size=settings.page_size,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        packed=weights.reader,
        progress=startup.loaded,
    )
    if weights.hold is not None:
        loaded = weights.hold(loaded)
    num_pages, running = pages_for(settings, loaded)
    runner = ModelRunner(
        loaded,
        num_pages,
        max_running=running,
        max_batch_tokens=settings.max_batch_tokens,
        cuda_graphs=not settings.eager,
        compile=not settings.eager,
        invariant=settings.invariant != "off",
    )
    logger.info("%s", WARMING if settings.device == "cpu" else WARMING_CUDA)
    runner.warm_up(startup.enter)
    _tell_of(runner.finding, settings)
    logger.info(
        "%s: %d layers, context %d, %s, fingerprint %s",
        settings.model_name,
        loaded.layout.num_layers,
        loaded.max_model_len,
        describe(runner.cache),
        loaded.fingerprint[:12],
    )
    return loaded, runner


def _tell_of(finding: Finding, settings: WorkerSettings) -> None:
    """Log what was found. Raises ConfigError where the operator asked for more than holds."""
    if finding.holds:
        logger.info("output is batch-invariant (numerics %s)", finding.numerics)
    elif settings.invariant == "on":
        raise ConfigError(f"invariant is 'on', but {finding.reason}; set it to auto to serve all the same")
    elif settings.invariant == "auto":
        logger.warning("output is not batch-invariant: %s", finding.reason)
