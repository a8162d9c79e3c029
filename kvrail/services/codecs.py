"""The codecs of one worker: made once, at start; their kernels compiled before they are needed, and not in its way."""

import asyncio
import logging
import threading
from collections.abc import Collection
from concurrent.futures import Future

from kvrail import background
from kvrail.codec import registry
from kvrail.codec.base import BlockSpec, Codec
from kvrail.codec.compiling import CompilerProcess, Order, sample_pages, use_once
from kvrail.codec.cost import CodecCost, measure
from kvrail.codec.splitzip.one_stage.codebook import Codebook, CodebookError
from kvrail.config import WorkerSettings, flag_name
from kvrail.engine.loader import LoadedModel
from kvrail.errors import ConfigError
from kvrail.tuning import compute_with

logger = logging.getLogger("kvrail.codecs")

USUAL_CODEC = "splitzip-channel"
WITHOUT_CODE = "raw"
AUTO = "auto"
"""In place of a codec's name: the decode worker chooses (kvrail/services/decode/choice.py)."""
MEASURED_BYTES = 1 << 20
"""KV on which a codec's cost is measured."""


class CodecChoiceError(Exception):
    """No codec has this name, it does not take this worker's pages, or it is lossy; the message names the remedy."""


class Codecs:
    """The codecs that take a worker's pages, by name, with the codebook that its settings name or else the shipped one.

    allow_lossy: whether codecs that do not restore every bit can be asked for too. Raises ConfigError where the
    codebook cannot be read.
    """

    def __init__(self, settings: WorkerSettings, *, allow_lossy: bool) -> None:
        self._allow_lossy = allow_lossy
        self._dtype = settings.kv_dtype
        self._path = settings.codebook
        self._codebook = _load(settings.codebook) if settings.codebook else None
        self._all = {name: registry.get(name, self._codebook) for name in registry.names()}
        self._loaded: LoadedModel | None = None
        self._compiler: CompilerProcess | None = None
        self._closed = False
        self._first_uses: dict[str, Future[None]] = {}
        self._asking = threading.Lock()
        self._loading = threading.Lock()  # one codec at a time

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
    def exact(self) -> tuple[str, ...]:
        """Names of those that restore every bit, the plain bytes first."""
        return tuple(
            sorted((name for name in self.names if self._all[name].exact), key=lambda name: name != WITHOUT_CODE)
        )

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
        book = self._codebook
        if book is None:
            return
        if book.model_fingerprint not in ("", loaded.fingerprint):
            raise ConfigError(
                f"codebook {self._path} was calibrated on {book.model} with fingerprint {book.model_fingerprint}, but"
                f" the model here has {loaded.fingerprint}; calibrate one on this model (kvrail calibrate) or leave"
                f" {flag_name('codebook')} out"
            )
        try:
            book.tops(self._dtype, "keys", range(loaded.layout.num_layers))
        except CodebookError as error:
            raise ConfigError(f"{flag_name('codebook')} {self._path}: {error}") from None

    def prepare(self, first: str, loaded: LoadedModel) -> None:
        """Compile what plain bytes and codec `first` need, here, before requests come; the others beside them."""
        for name in {WITHOUT_CODE, first}:
            self.warm_up(name, loaded)
        self.warm_up_others((WITHOUT_CODE, first), loaded)

    def warm_up(self, name: str, loaded: LoadedModel) -> None:
        """Compile codec `name`, or load what was compiled before, in this thread, before requests come.

        Raises CodecChoiceError as `get`.
        """
        self._loaded = loaded
        use_once(self.get(name), sample_pages(_measured_spec(loaded), loaded.device))
        self._mark_used(name)

    def warm_up_others(self, ready: Collection[str], loaded: LoadedModel) -> None:
        """Begin to compile all codecs but those `ready`, in a process of its own (kvrail/codec/compiling.py).

        In this process nothing is compiled or loaded until `ready` asks for it.
        """
        self._loaded = loaded
        kind = loaded.device.type
        names = tuple(name for name in self.names if name not in ready and registry.compiles(name, kind))
        if names and self._compiler is None:
            self._compiler = CompilerProcess(Order(_measured_spec(loaded), str(loaded.device), self._path, names))

    async def ready(self, name: str) -> Codec:
        """The codec called `name`, once nothing is left to be compiled for it; to be awaited before its first use.

        Where it is being compiled, that is waited for, and it comes next; then a thread loads it. Where compiling ahead
        has failed that thread compiles it. Later calls return at once. Raises CodecChoiceError as `get`.
        """
        codec = self.get(name)
        used = self._first_use(name)
        if not used.done():
            await asyncio.shield(asyncio.wrap_future(used))  # others may wait for the same
        return codec

    async def measured(self, name: str, *, on_device: bool = False) -> CodecCost:
        """The cost here of codec `name`; raises CodecChoiceError as `get`, or where it could not be compiled.

        Measured by the process that compiles; of what this one has compiled itself, in a thread. on_device: payloads
        stay on the device if the codec has such. Needs a warm-up before.
        """
        codec, loaded, compiler = self.get(name), self._loaded, self._compiler
        assert loaded is not None, "measured comes after prepare"
        if compiler is not None and compiler.knows(name):
            cost = await asyncio.shield(asyncio.wrap_future(compiler.outcome(name)))
            if cost is None:
                raise CodecChoiceError(f"codec {name!r} could not be compiled ahead")
            return cost
        await self.ready(name)

        def measure_here() -> CodecCost:
            compute_with(1)
            pages = sample_pages(_measured_spec(loaded), loaded.device)
            return measure(codec, pages, on_device=on_device and codec.device_payloads)

        return await asyncio.to_thread(measure_here)

    def close(self) -> None:
        """End the process that compiles, if it still runs. It also ends with this one, however that ends."""
        self._closed = True
        if self._compiler is not None:
            self._compiler.close()

    def _mark_used(self, name: str) -> None:
        with self._asking:
            self._first_uses.setdefault(name, Future())
            if not self._first_uses[name].done():
                self._first_uses[name].set_result(None)

    def _first_use(self, name: str) -> "Future[None]":
        """Done once `name` has been used here; begins what leads there where nobody has."""
        with self._asking:
            used = self._first_uses.get(name)
            if used is not None:
                return used
            used = self._first_uses[name] = Future()
        loaded, compiler = self._loaded, self._compiler
        if loaded is None or not registry.compiles(name, loaded.device.type):
            used.set_result(None)
            return used

        def load(_: object = None) -> None:
            if self._closed:  # the worker ends, and whoever still asks compiles it
                used.set_result(None)
                return
            background.start(f"load {name}", lambda: self._load(self._all[name], loaded, used))

        if compiler is not None and compiler.knows(name):
            compiler.hurry(name)
            compiler.outcome(name).add_done_callback(load)
        else:
            load()
        return used

    def _load(self, codec: Codec, loaded: LoadedModel, used: "Future[None]") -> None:
        """Use a codec once, in a thread of its own."""
        try:
            compute_with(1)
            with self._loading:
                use_once(codec, sample_pages(_measured_spec(loaded), loaded.device))
        except Exception:
            logger.exception("codec %s could not be warmed up; requests will try it", codec.name)
        finally:
            used.set_result(None)


def _measured_spec(loaded: LoadedModel) -> BlockSpec:
    """Pages of one layer, MEASURED_BYTES in all about; what kernels are compiled for does not depend on how many."""
    layout = loaded.layout
    count = max(1, MEASURED_BYTES * layout.num_layers // layout.page_bytes)
    shape = (1, count, layout.page_size, layout.num_kv_heads, layout.key_dim, layout.value_dim)
    return BlockSpec(layout.dtype, *shape, layout.scaled)


def _load(path: str) -> Codebook:
    try:
        return Codebook.load(path)
    except CodebookError as error:
        raise ConfigError(str(error)) from None
