"""The codecs of one worker: made once, at start; their kernels compiled beside requests, which never wait for that."""

import asyncio
import logging
import threading
from time import perf_counter

from kvrail.codec import registry
from kvrail.codec.base import BlockSpec, Codec
from kvrail.codec.compiling import CompilerProcess, Order, sample_pages, use_once
from kvrail.codec.cost import CodecCost, measure
from kvrail.codec.splitzip.one_stage.codebook import Codebook, CodebookError
from kvrail.config.origins import flag_name
from kvrail.config.settings import WorkerSettings
from kvrail.engine.model.loader import LoadedModel
from kvrail.errors import ConfigError
from kvrail.runtime import background
from kvrail.runtime.tuning import compute_with
from kvrail.telemetry.worker import CodecMetrics

logger = logging.getLogger("kvrail.codecs")

USUAL_CODEC = "splitzip-channel"
WITHOUT_CODE = "raw"
AUTO = "auto"
"""In place of a codec's name: the decode worker chooses (kvrail/services/decode/choice.py)."""
MEASURED_BYTES, MEASURED_BYTES_CUDA = 1 << 20, 16 << 20
"""KV on which a codec's cost is measured. On a GPU that is a frame of a fast link (transfer/sizes.py): launches and
copies take a millisecond of each frame, so that 1 MiB made every codec seem too slow for links beyond 1.5 GB/s."""


class CodecChoiceError(Exception):
    """No codec has this name, it does not take this worker's pages, or it is lossy; the message names the remedy."""


class Codecs:
    """The codecs that take a worker's pages, by name, with the codebook that its settings name or else the shipped one.

    allow_lossy: whether codecs that do not restore every bit can be asked for too. Raises ConfigError where the
    codebook cannot be read. Until `prepare`, every codec is usable, and compiles at its first use. Belongs to one event
    loop.
    """

    def __init__(self, settings: WorkerSettings, *, allow_lossy: bool) -> None:
        self._allow_lossy = allow_lossy
        self._dtype = settings.kv_dtype
        self._path = settings.codebook
        self._codebook = _load(settings.codebook) if settings.codebook else None
        self._all = {name: registry.get(name, self._codebook) for name in registry.names()}
        self._loaded: LoadedModel | None = None
        self._metrics: CodecMetrics | None = None
        self._ahead: CompilerProcess | None = None  # compiles and measures those of `auto`, at low priority
        self._urgent: CompilerProcess | None = None  # compiles what was asked for
        self._closed = False
        self._used: set[str] = set()  # once, here
        self._asked_for: dict[str, str] = {}  # and not usable yet: how that stands
        self._compiling = threading.Lock()  # one at a time

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the codecs that can be asked for."""
        return tuple(
            name
            for name, codec in self._all.items()
            if self._dtype in codec.dtypes and (codec.exact or self._allow_lossy)
        )

    @property
    def parameters(self) -> dict[str, int]:
        """By the name of each that can be asked for, the number that must be equal at both ends."""
        return {name: self._all[name].parameters_id for name in self.names}

    @property
    def withheld(self) -> tuple[str, ...]:
        """Names of those that take the pages and cannot be asked for because they are lossy."""
        takers = (name for name, codec in self._all.items() if self._dtype in codec.dtypes)
        return tuple(name for name in takers if name not in self.names)

    def get(self, name: str) -> Codec:
        """The codec called `name`; raises CodecChoiceError."""
        codec = self._all.get(name)
        if codec is None:
            raise CodecChoiceError(f"codec {name!r} is unknown; choose one of {', '.join(self.names)}")
        if self._dtype not in codec.dtypes:
            raise CodecChoiceError(
                f"codec {name!r} takes {', '.join(sorted(codec.dtypes))}, but the KV pages are {self._dtype}; choose"
                f" one of {', '.join(self.names)}, or workers with another {flag_name('kv_dtype')}"
            )
        if name not in self.names:
            raise CodecChoiceError(
                f"codec {name!r} is lossy: it does not restore every bit of the KV; choose one of"
                f" {', '.join(self.names)}, or start decode workers with {flag_name('allow_lossy')}"
            )
        return codec

    @property
    def automatic(self) -> tuple[str, ...]:
        """Names of those among which codec `auto` chooses: exact ones, the plain bytes first."""
        chosen = (name for name in self.names if registry.info(name).auto and self._all[name].exact)
        return tuple(sorted(chosen, key=lambda name: name != WITHOUT_CODE))

    @property
    def usual(self) -> str:
        """Name of the codec to ask for while nothing is known of a link that passes through hosts."""
        return USUAL_CODEC if USUAL_CODEC in self.names else WITHOUT_CODE

    def check(self, setting: str) -> str:
        """A codec's name, or AUTO. Raises ConfigError where `setting` names a codec that cannot be used."""
        try:
            return AUTO if setting == AUTO else self.get(setting).name
        except CodecChoiceError as error:
            raise ConfigError(f"{flag_name('codec')}: {error}") from None

    def check_codebook(self, loaded: LoadedModel) -> None:
        """Raise ConfigError where the codebook was made for another model, or has no windows for these pages."""
        codebook = self._codebook
        if codebook is None:
            return
        if codebook.model_fingerprint not in ("", loaded.fingerprint):
            raise ConfigError(
                f"codebook {self._path} was calibrated on {codebook.model} with fingerprint"
                f" {codebook.model_fingerprint}, but the model here has {loaded.fingerprint}; calibrate one on"
                f" this model (kvrail calibrate) or leave {flag_name('codebook')} out"
            )
        try:
            codebook.tops(self._dtype, "keys", range(loaded.layout.num_layers))
        except CodebookError as error:
            raise ConfigError(f"{flag_name('codebook')} {self._path}: {error}") from None

    def prepare(self, first: str, loaded: LoadedModel, metrics: CodecMetrics) -> None:
        """Compile what plain bytes and codec `first` need, here, before requests come; those of `auto` beside them.

        These are compiled and measured in a process of its own (kvrail/codec/compiling.py). In this process nothing is
        compiled or loaded until it is asked for. Raises CodecChoiceError as `get`.
        """
        for name in {WITHOUT_CODE, first}:
            begin = perf_counter()
            use_once(self.get(name), sample_pages(_measured_spec(loaded), loaded.device))
            metrics.compiled(name, perf_counter() - begin)
            self._used.add(name)
        self._loaded, self._metrics = loaded, metrics
        if names := tuple(name for name in self.automatic if not self.usable(name)):
            self._ahead = CompilerProcess(self._order(loaded, *names))

    def usable(self, name: str) -> bool:
        """Whether nothing is left to be compiled or loaded for a codec here, so that no request waits for it."""
        loaded = self._loaded
        return loaded is None or name in self._used or loaded.device.type not in registry.info(name).compiles_on

    def ask_for(self, name: str) -> str:
        """Begin at once what is left to make a codec usable, in a thread; returns how that stands, empty once it is."""
        if self.usable(name):
            return ""
        if name not in self._asked_for:
            self._asked_for[name] = "is being compiled"
            logger.info("codec %s was asked for and is compiled now; meanwhile others are used in its place", name)
            background.start(f"compile {name}", lambda: self._compile(name))
        return self._asked_for[name]

    async def measured(self, name: str, loaded: LoadedModel, *, on_device: bool = False) -> CodecCost:
        """The cost here of codec `name`; raises CodecChoiceError as `get`, or where it could not be compiled.

        Measured by the process that compiles; of what this one has compiled itself, in a thread. on_device: payloads
        stay on the device if the codec has such.
        """
        codec, ahead = self.get(name), self._ahead
        if ahead is not None and ahead.knows(name):
            cost = await asyncio.shield(asyncio.wrap_future(ahead.outcome(name)))
            if cost is None:
                raise CodecChoiceError(f"codec {name!r} could not be compiled ahead")
            return cost

        def measure_here() -> CodecCost:
            compute_with(1)
            pages = sample_pages(_measured_spec(loaded), loaded.device)
            return measure(codec, pages, on_device=on_device and codec.device_payloads)

        return await asyncio.to_thread(measure_here)

    def close(self) -> None:
        """End the processes that compile, if they still run. They also end with this one, however that ends."""
        self._closed = True
        for process in (self._ahead, self._urgent):
            if process is not None:
                process.close()

    def _compile(self, name: str) -> None:
        """Make a codec usable; in a thread of its own.

        A process compiles, unless the one that compiles ahead has done so, and this one loads what that has left on
        disk. Only where no process could compile does this one.
        """
        loaded, metrics, begin = self._loaded, self._metrics, perf_counter()
        assert loaded is not None and metrics is not None, "until prepare, every codec is usable"
        metrics.compiling(name, True)
        try:
            with self._compiling:
                ahead = self._ahead
                outcome = ahead.outcome(name) if ahead is not None and ahead.knows(name) else None
                if not self._closed and (outcome is None or not outcome.done() or outcome.result() is None):
                    self._urgent = CompilerProcess(self._order(loaded, name), urgent=True)
                    self._urgent.outcome(name).result()
                if self._closed:
                    return
                compute_with(1)
                use_once(self._all[name], sample_pages(_measured_spec(loaded), loaded.device))
        except Exception:
            logger.exception("codec %s could not be compiled; others are used in its place until a restart", name)
            self._asked_for[name] = "could not be compiled"
        else:
            self._used.add(name)
            seconds = perf_counter() - begin
            metrics.compiled(name, seconds)
            logger.info("codec %s is compiled and in use after %.1f s", name, seconds)
        finally:
            metrics.compiling(name, False)

    def _order(self, loaded: LoadedModel, *names: str) -> Order:
        return Order(_measured_spec(loaded), str(loaded.device), self._path, names)


def _measured_spec(loaded: LoadedModel) -> BlockSpec:
    """Pages of one layer, about as many bytes as are measured; what kernels are compiled for does not depend on it."""
    layout = loaded.layout
    wanted = MEASURED_BYTES_CUDA if loaded.device.type == "cuda" else MEASURED_BYTES
    count = max(1, wanted * layout.num_layers // layout.page_bytes)
    shape = (1, count, layout.page_size, layout.num_kv_heads, layout.key_dim, layout.value_dim)
    return BlockSpec(layout.dtype, *shape, layout.scaled)


def _load(path: str) -> Codebook:
    try:
        return Codebook.load(path)
    except CodebookError as error:
        raise ConfigError(str(error)) from None
