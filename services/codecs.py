"""The codecs of one worker: made once, at start."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from codec import registry
from codec.base import Codec, PagedBlock
from codec.splitzip.codebook import Codebook, CodebookError
from kvrail import background
from kvrail.config import WorkerSettings, flag_name
from kvrail.engine.cache import PagedCache
from kvrail.engine.loader import LoadedModel
from kvrail.engine.streams import SideStream
from kvrail.errors import ConfigError
from services.pages import paged_block

logger = logging.getLogger("kvrail.codecs")

DEFAULT_CODEC = "splitzip-channel"
WITHOUT_CODE = "raw"
"""Asked for by default where the default codec does not take the pages."""


AUTO = "auto"
"""In place of a codec's name: the decode worker chooses (services/decode/choice.py)."""
MEASURED_BYTES = 1 << 20
"""KV on which a codec's cost is measured."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec takes for each byte of uncompressed KV.

    encode_s, decode_s: seconds, over all stages. stages: payload bytes of each.
    """

    encode_s: float
    decode_s: float
    stages: tuple[float, ...]


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

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the codecs that can be asked for."""
        return tuple(
            name
            for name, codec in self._all.items()
            if self._dtype in codec.dtypes and (codec.exact or self._allow_lossy)
        )

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

    def default(self, setting: str = "") -> str:
        """Name of the codec to ask for: `setting` (or AUTO), or where it is empty the default, which suits the pages.

        Raises ConfigError where `setting` names a codec that cannot be used.
        """
        if setting == AUTO:
            return AUTO
        if setting:
            try:
                return self.get(setting).name
            except CodecChoiceError as error:
                raise ConfigError(f"{flag_name('codec')}: {error}") from None
        if DEFAULT_CODEC in self.names:
            return DEFAULT_CODEC
        logger.info("KV crosses with codec %s: %s takes no %s pages", WITHOUT_CODE, DEFAULT_CODEC, self._dtype)
        return WITHOUT_CODE

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

    def warm_up(self, name: str, loaded: LoadedModel) -> None:
        """Encode and decode a page with codec `name`, so that no request waits for kernels to be compiled."""
        _run(self.get(name), _random_pages(loaded, 1))

    def warm_up_others(self, ready: Collection[str], loaded: LoadedModel) -> None:
        """The same for all codecs but those `ready`, in a thread beside the serving of requests."""

        def warm_up() -> None:
            for name in self.names:
                if name not in ready and not background.stopping():
                    self.warm_up(name, loaded)

        background.start("warm-up", warm_up)

    def measure(self, loaded: LoadedModel) -> dict[str, CodecCost]:
        """The cost here of each exact codec that can be asked for, on normally distributed KV, with warm kernels."""
        layer_bytes = loaded.layout.page_bytes // loaded.layout.num_layers
        pages = _random_pages(loaded, max(1, MEASURED_BYTES // layer_bytes))
        costs = {}
        for name in self.names:
            codec = self.get(name)
            if codec.exact:
                _run(codec, pages)
                costs[name] = _run(codec, pages)
        return costs


def _random_pages(loaded: LoadedModel, count: int) -> PagedBlock:
    """Pages of one layer, outside the worker's pool."""
    cache = PagedCache(replace(loaded.layout, num_layers=1), count, loaded.device)
    for pool in (cache.keys, cache.values):
        pool.copy_(torch.randn(pool.shape))
    return paged_block(cache, range(1), range(count))


def _run(codec: Codec, pages: PagedBlock) -> CodecCost:
    """Encode and decode once."""
    side = SideStream(pages.device)
    begin = perf_counter()
    with side.after(side.mark()):  # as transfers do it, also on a GPU that is not this thread's current one
        payloads = codec.encode(pages).stages()
        encoded = perf_counter()
        for stage in range(len(payloads)):
            codec.decode(stage, payloads[: stage + 1], pages)
    side.synchronize()
    raw_bytes = pages.spec.raw_bytes
    stages = tuple(payload.nbytes / raw_bytes for payload in payloads)
    return CodecCost((encoded - begin) / raw_bytes, (perf_counter() - encoded) / raw_bytes, stages)


def _load(path: str) -> Codebook:
    try:
        return Codebook.load(path)
    except CodebookError as error:
        raise ConfigError(str(error)) from None
