"""Logs the progress of loading weights."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from transformers.utils import logging as transformers_logging

from kvrail.engine.model.header import read_header
from kvrail.engine.model.weights import Progress

logger = logging.getLogger("kvrail.worker")

LOG_S = 3.0
"""Seconds between two log lines; weights that load faster get only the first."""
GB = 1e9


@contextmanager
def logged_loading(folder: Path, progress: Progress) -> Iterator[None]:
    """Log how many bytes of the safetensors files of `folder` transformers has loaded, while the block runs.

    progress: called as they change. Raises ConfigError where a header is damaged.
    """
    sizes = tensor_bytes(folder)
    total = sum(sizes.values())
    logger.info("loading weights: %.2f GB in %d tensors", total / GB, len(sizes))
    progress(0, total)
    before = transformers_logging.set_tqdm_hook(
        lambda _, args, kwargs: _Loading(sizes, total, progress, *args, **kwargs)
    )
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor in the safetensors files of `folder`. Raises ConfigError where one is damaged."""
    headers = [read_header(path) for path in sorted(folder.glob("*.safetensors"))]
    return {tensor.name: tensor.end - tensor.begin for header in headers for tensor in header.tensors}


class _Loading(AbstractContextManager["_Loading"]):
    """Takes the place of transformers' progress bar: it yields (name, how to load) of each tensor."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        total: int,
        progress: Progress,
        items: Any = (),
        clock: Callable[[], float] = monotonic,
        **_: Any,
    ) -> None:
        self._progress = progress
        self._sizes, self._total, self._items, self._clock = sizes, total, items, clock

    def __iter__(self) -> Iterator[Any]:
        """Yield each item; the one before it is loaded by then."""
        done, logged = 0, self._clock()
        mean = self._total // max(1, len(self._sizes))
        for item in self._items:
            yield item
            name = item[0] if isinstance(item, tuple) else ""
            done += self._sizes.get(name, mean)  # where transformers changed the name, the average
            self._progress(min(done, self._total), self._total)
            if self._clock() - logged > LOG_S:
                logged = self._clock()
                logger.info("loading weights: %.2f of %.2f GB", min(done, self._total) / GB, self._total / GB)

    def update(self, *_: Any) -> None:
        """Do nothing: items are counted as they are yielded."""

    def close(self) -> None:
        """Do nothing: there is no bar."""

    def __exit__(self, *_: object) -> None:
        self.close()
