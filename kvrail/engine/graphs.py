"""Decode steps captured as CUDA graphs: one launch replays the whole model.

A graph replays fixed shapes over fixed addresses, so there is one for each of a few batch sizes, and the integers of a
step are copied to where the graph reads them. Rows that pad a step to its batch size have no tokens: they store nothing
and attend to nothing.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.attention.meta import StepMeta, decode, encode
from kvrail.engine.attention.step import PagedStep
from kvrail.engine.cache import PagedCache
from kvrail.engine.inputs import StepInputs
from kvrail.engine.loader import LoadedModel
from kvrail.engine.packing import PackedStep
from kvrail.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class _Views:
    """Where the integers of a step of `size` sequences lie in a byte buffer, on the host or on the device."""

    token_ids: torch.Tensor  # int64 [size]
    positions: torch.Tensor  # int64 [size]
    data: torch.Tensor  # int32, see attention.meta


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One batch size: the bytes to copy, their parts to fill, the graph and the logits that it leaves."""

    host: torch.Tensor
    device: torch.Tensor
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    kv_lens: npt.NDArray[np.int32]
    page_tables: npt.NDArray[np.int32]
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps of one model over one page pool."""

    def __init__(self, loaded: LoadedModel, cache: PagedCache, max_running: int) -> None:
        self._loaded = loaded
        self._cache = cache
        self._width = min(cache.layout.pages_for(loaded.max_model_len), cache.num_pages)
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sizes = batch_sizes(max_running)
        self._pool = torch.cuda.graph_pool_handle()
        # The largest first: the others find their memory in what it took.
        self._captured = {size: self._capture(size) for size in reversed(self._sizes)}

    def run(self, packed: PackedStep) -> torch.Tensor:
        """Replay `packed`, a step of sequences with one new token each: float32 logits [sequences, vocab].

        They are valid until the next call.
        """
        rows = len(packed.plan)
        step = self._captured[next(size for size in self._sizes if size >= rows)]
        self._copied.synchronize()  # the host arrays are free again once the last copy has read them
        step.token_ids[:rows] = packed.token_ids
        step.positions[:rows] = packed.positions
        step.kv_lens[:rows] = packed.plan[:, 1]
        step.kv_lens[rows:] = 0
        step.page_tables[:rows, : packed.page_tables.shape[1]] = packed.page_tables
        step.device.copy_(step.host, non_blocking=True)
        self._copied.record()
        step.graph.replay()
        return step.logits[:rows]

    def _padding(self, size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """A step of `size` rows that all are padding, encoded."""
        sums, none = np.zeros(1, np.int64), np.zeros(0, np.int64)
        tables, lengths = np.zeros((size, self._width), np.int64), np.zeros(size, np.int64)
        counters = np.zeros(size * self._cache.layout.num_kv_heads, np.int64)
        return encode(StepMeta([(1, 1)] * size, lengths, lengths, tables, sums, sums, none, counters))

    def _capture(self, size: int) -> _Captured:
        """Run twice, so that everything is compiled and allocated, then capture."""
        cache, device = self._cache, self._loaded.device
        data, plan = self._padding(size)
        here = torch.zeros(16 * size + data.nbytes, dtype=torch.uint8, pin_memory=True)
        there = here.to(device)
        host, place = _views(here, size), _views(there, size)
        step = PagedStep(
            cache.keys, cache.values, cache.key_scales, cache.value_scales, place.data, torch.from_numpy(plan)
        )
        inputs = StepInputs(place.token_ids, place.positions, 0, size, step)
        graph = torch.cuda.CUDAGraph()
        try:
            for _ in range(2):
                self._loaded.logits(inputs)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._loaded.logits(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(f"decode steps cannot be captured ({error}); set cuda_graphs to false") from error
        meta = decode(host.data, torch.from_numpy(plan))
        return _Captured(
            host=here,
            device=there,
            token_ids=host.token_ids.numpy(),
            positions=host.positions.numpy(),
            kv_lens=meta.kv_lens.numpy(),
            page_tables=meta.page_tables.numpy(),
            graph=graph,
            logits=logits,
        )


def _views(buffer: torch.Tensor, size: int) -> _Views:
    ids, positions, data = buffer[: 8 * size], buffer[8 * size : 16 * size], buffer[16 * size :]
    return _Views(ids.view(torch.int64), positions.view(torch.int64), data.view(torch.int32))


def batch_sizes(max_running: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, … and last `max_running`."""
    small = [size for size in (1, 2, 4, 8) if size < max_running]
    return [*small, *range(16, max_running, 8), max_running]
