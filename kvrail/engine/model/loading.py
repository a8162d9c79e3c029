"""How far the loading of weights has come, told in lines while it lasts."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from transformers.utils import logging as transformers_logging

from kvrail.engine.model.header import read_header

logger = logging.getLogger("kvrail.worker")

TELL_S = 3.0
"""Seconds between two lines; weights that load faster get none but the first."""
GB = 1e9


@contextmanager
def told_loading(folder: Path) -> Iterator[None]:
    """Tell of weights that transformers loads inside from the safetensors files of `folder`, by their bytes.

    Raises ConfigError where a header of theirs is damaged.
    """
    sizes = tensor_bytes(folder)
    total = sum(sizes.values())
    logger.info("loading weights: %.2f GB in %d tensors", total / GB, len(sizes))
    before = transformers_logging.set_tqdm_hook(lambda _, args, kwargs: _Loading(sizes, total, *args, **kwargs))
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor in the safetensors files of `folder`. Raises ConfigError where one is damaged."""
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    return {tensor.name: tensor.end - tensor.begin for header in headers for tensor in header.tensors}


class _Loading:
    """What transformers uses as its progress bar: it walks over (name, how to load) of each tensor."""

    def __init__(
        self, sizes: Mapping[str, int], total: int, items: Any = (), clock: Callable[[], float] = monotonic, **_: Any
    ) -> None:
        self._sizes, self._total, self._items, self._clock = sizes, total, items, clock

    def __iter__(self) -> Iterator[Any]:
        """Hand each item on; the one before it is loaded by then."""
        done, told = 0, self._clock()
        mean = self._total // max(1, len(self._sizes))
        for item in self._items:
            yield item
            name = item[0] if isinstance(item, tuple) else ""
            done += self._sizes.get(name, mean)  # names that transformers changes are taken as average ones
            if self._clock() - told > TELL_S:
                told = self._clock()
                logger.info("loading weights: %.2f of %.2f GB", min(done, self._total) / GB, self._total / GB)

    def update(self, *_: Any) -> None:
        """Take no note: items are counted as they are walked over."""

    def close(self) -> None:
        """Do nothing: there is no bar."""

    def __enter__(self) -> "_Loading":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
