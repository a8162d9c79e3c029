"""Runs one step of the model over the page pool."""

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from kvrail.engine.batch.batch import Extras, Feed, SequenceSlice
from kvrail.engine.batch.inputs import step_inputs
from kvrail.engine.batch.packing import pack
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.closing_cache import ClosingCache, PoolSize, closing_cache
from kvrail.engine.model.fusion import compile_layers
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.model.onednn_linear import mean_weights
from kvrail.engine.sampling.draw import DrawParams
from kvrail.engine.step.graphs import StepGraphs, batch_sizes
from kvrail.engine.step.invariance import Finding, check, choose_products
from kvrail.runtime.tuning import compute_with
from kvrail.telemetry.startup import Phase

logger = logging.getLogger(__name__)

_PRODUCTS_FOR_ALL_CORES = 1 << 23
"""Multiply-adds of a linear layer from which a step on a CPU takes all cores. A smaller one takes one core some 100 us:
further cores save little of it, and if one of them is late, all wait (docs/decisions/0013-cpu-attention.md)."""

_COMPILED_FOR = 2048
"""Tokens of the step with which layers are compiled; the code is for any number of tokens."""


class ModelRunner:
    """The data plane of one worker: a loaded model and its page pool.

    Several runners may share one loaded model, each with a pool of its own; one thread at a time may execute. Graphs
    and compilation are for CUDA and take effect with `warm_up`. Compilation is the model's, so it applies to every
    runner that shares it.

    num_pages: of plain pages; a PoolSize where full pages are closed. invariant: compute so that output is
    batch-invariant, and try in `warm_up` whether it is. On CUDA this chooses, for the whole process, how products are
    computed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_pages: int | PoolSize,
        *,
        max_running: int,
        max_batch_tokens: int,
        cuda_graphs: bool = True,
        compile: bool = True,
        invariant: bool = True,
    ) -> None:
        self.loaded = loaded
        self.cache = (
            PagedCache(loaded.layout, num_pages, loaded.device)
            if isinstance(num_pages, int)
            else closing_cache(loaded.layout, num_pages, loaded.device)
        )
        self.max_running = max_running
        self._max_tokens = max(max_batch_tokens, max_running)
        self._wants_graphs = cuda_graphs and self.launches_async
        self._wants_compiled = compile and self.launches_async
        self._graphs: StepGraphs | None = None
        self._invariant = invariant
        self._min_rows = loaded.least_rows if invariant and self.launches_async else 0
        self.finding: Finding = Finding("", "not asked for" if not invariant else "not tried")
        self._threads = torch.get_num_threads()
        self._weights = mean_weights(loaded.model)

    @property
    def launches_async(self) -> bool:
        """Whether `execute` returns before the device has finished."""
        return self.loaded.device.type == "cuda"

    @property
    def extras(self) -> Extras:
        """What the last step gives beside its logits."""
        return Extras() if self._graphs is None else self._graphs.extras

    def bind_thread(self) -> None:
        """Bind the calling thread to what computes: the model's GPU, for kernels and captures, or the CPU's cores."""
        if self.launches_async:
            torch.cuda.set_device(self.loaded.device)
        else:
            compute_with(self._threads)

    def warm_up(self, enter: Callable[[Phase], None] = lambda _: None) -> None:
        """Compile kernels and capture graphs, so that no request waits for them; then set `finding`.

        Overwrites pages. enter: called as each phase begins.
        """
        enter("compile")
        if self.launches_async:
            self._warm_up_cuda(enter)
        else:
            importlib.import_module("kvrail.engine.attention.cpu")
        enter("warm_up")
        if self._invariant:
            self.finding = check(self, self.max_running, self._max_tokens)
        if isinstance(self.cache, ClosingCache):
            self.cache.rehearse()

    def _warm_up_cuda(self, enter: Callable[[Phase], None]) -> None:
        self.bind_thread()
        choose_products(invariant=self._invariant)
        if self._wants_compiled:
            compile_layers(self.loaded.layers, self.loaded.projections)
        for slices in self._rehearsals():
            self.execute(slices)
        enter("capture")
        if self._wants_graphs:
            self._graphs = StepGraphs(self.loaded, self.cache, self.max_running, self._max_tokens, self._min_rows)
        fed = Feed(torch.zeros(1, dtype=torch.int64, device=self.loaded.device), [0])
        self.execute([SequenceSlice([0], 0, range(self.cache.open_pages), 1)], feed=fed)
        torch.cuda.synchronize(self.loaded.device)
        logger.info(
            "warmed up: layers %s, steps %s",
            "compiled" if self._wants_compiled else "not compiled, as asked",
            "captured" if self._wants_graphs else "not captured, as asked: every kernel is launched by itself",
        )

    def execute(
        self,
        slices: Sequence[SequenceSlice],
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor:
        """Compute the slices' new tokens and keep their KV in the pages.

        Returns float32 logits [rows, vocab] on the device, `num_logits` rows a slice, in order; on CUDA they are valid
        until the next call. on_layer(i) is called on the host once the work of all layers up to i has been enqueued, in
        order, for the last layer and for some or all of those before. feed: the tokens of the first slices. draws:
        parameters of each row's draw, if the step can make it by itself: see `extras`.
        """
        packed = pack(slices, self.loaded.layout.page_size, self.cache.slots)
        tokens, sequences = len(packed.token_ids), len(packed.plan)
        if tokens > self._max_tokens or sequences > self.max_running:
            raise ValueError(
                f"a step of {sequences} sequences and {tokens} tokens exceeds max_running {self.max_running} "
                f"or max_batch_tokens {self._max_tokens}"
            )
        for piece in slices:
            if piece.copied_page is not None:
                self.cache.copy_page(piece.copied_page, piece.page_table[piece.start // self.loaded.layout.page_size])
        if self._graphs is not None:
            logits = self._graphs.run(packed, on_layer, feed, draws)
            if logits is not None:
                return logits
        inputs = step_inputs(self.cache, packed, self.loaded.dtype, on_layer, feed, self._min_rows)
        if self.launches_async or tokens * self._weights >= _PRODUCTS_FOR_ALL_CORES:
            return self.loaded.logits(inputs)
        compute_with(1)
        try:
            return self.loaded.logits(inputs)
        finally:
            compute_with(self._threads)

    def _rehearsals(self) -> Iterator[list[SequenceSlice]]:
        """Steps of every kind, on any pages: prefill from scratch and onwards, decode, and mixed."""
        size = self.loaded.layout.page_size
        room = min(self._max_tokens, self.cache.open_pages * size, self.loaded.max_model_len)
        pages = range(self.cache.open_pages)
        yield [SequenceSlice([0] * min(room, _COMPILED_FOR), 0, pages, 1)]
        yield [SequenceSlice([0] * room, 0, pages, 1)]
        if room > 2:
            yield [SequenceSlice([0, 0], room - 2, pages, 1)]
        for rows in batch_sizes(self.max_running):
            yield [SequenceSlice([0], 0, pages, 1)] * rows
