"""Steps captured as CUDA graphs: a few launches replay the whole model, whatever the step's lengths.

A graph replays fixed shapes over fixed addresses, so there is one for each of a few sizes, and the integers of a step
are copied to where the graph reads them. Attention reads every length from there. Tokens that pad a step to its size
store nothing and attend to nothing.

There are two kinds. Steps in which each sequence has one new token are two graphs each, draws included; an event
between the two shows the host that the step nears its end. All other steps are captured by their number of tokens, for
any mix of chunks and decodes, as one graph for each group of layers: behind each graph, the group's pages are reported.
The head, with which such a step ends, is captured for several numbers of rows: a prompt needs one.

Beside transfers the cost of a launch is the interpreter's lock, which each call into torch releases and takes again. So
everything that can be captured is.
"""

import functools
import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from kvrail.engine.attention.step import PagedStep
from kvrail.engine.batch.batch import Extras, Feed
from kvrail.engine.batch.inputs import StepInputs, take_fed
from kvrail.engine.batch.packing import PackedStep
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.sampling.draw import DrawParams
from kvrail.engine.schedule.launch_delay import LEFT
from kvrail.engine.step.buffers import StepBuffer, StepSize, decode_size, mixed_size
from kvrail.errors import ConfigError

logger = logging.getLogger(__name__)

GROUPS = 12
"""Groups of layers of a step: behind the last one, a twelfth of the step's pages is still to be sent."""
STEPS = 3
"""Steps that may be on the device at once, and one more."""
VERIFIED_ROWS = 64
"""Rows of logits beyond one a sequence, as many as one sequence's drafts."""
HEADS = (32, 64, 128)
"""Rows for which the head is captured, beside the most that a step may have: it reads its weights in the time in which
it computes some two hundred rows, and logits become float32 row by row."""


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One size.

    graphs: in order, each with the last layer that it completes, or None. heads: one of them follows, by the rows of
    logits that each computes, the fewest first; a single one computes the last layers, too.
    """

    buffer: StepBuffer
    graphs: list[tuple[torch.cuda.CUDAGraph, int | None]]
    heads: dict[int, torch.cuda.CUDAGraph]

    def head(self, rows: int) -> torch.cuda.CUDAGraph:
        """What computes the logits of that many rows, and draws."""
        return next(graph for most, graph in self.heads.items() if rows <= most)


class StepGraphs:
    """Captured steps of one model over one page pool. All sizes share one memory pool: only one runs at a time.

    min_rows: fewest tokens of a step; fewer are padded to this. extras: those of the last step.
    """

    def __init__(
        self, loaded: LoadedModel, cache: PagedCache, max_running: int, max_tokens: int, min_rows: int = 0
    ) -> None:
        self.extras = Extras()
        self._loaded = loaded
        self._cache = cache
        self._near_ends = itertools.cycle([torch.cuda.Event() for _ in range(STEPS)])  # type: ignore[no-untyped-call]
        self._draws = torch.zeros(max(max_tokens, max_running), dtype=torch.int64, device=loaded.device)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(loaded.device)  # type: ignore[no-untyped-call]
        self._last_layer = len(loaded.layers) - 1
        self._near_end = max(0, round(self._last_layer * (1 - LEFT)))  # behind this layer, a step nears its end
        self._heads = [rows for rows in HEADS if rows >= min_rows]
        rows = max(max_running + VERIFIED_ROWS, min_rows)
        self._logits = torch.empty(rows, loaded.vocab_size, device=loaded.device)
        group = -(-len(loaded.layers) // GROUPS)
        cuts = {*range(group - 1, self._last_layer, group), self._last_layer}
        begin, free = perf_counter(), torch.cuda.mem_get_info(loaded.device)[0]
        gc.collect()
        torch.cuda.empty_cache()
        mixed, decodes = self._sizes(max_running, max(max_tokens, min_rows), min_rows)
        # The largest first: the others fit into its memory.
        self._mixed = [self._capture(size, cuts) for size in reversed(mixed)][::-1]
        self._decodes = [self._capture(size, {self._near_end}) for size in reversed(decodes)][::-1]
        taken = free - torch.cuda.mem_get_info(loaded.device)[0]
        logger.info(
            "captured decode steps of up to %d sequences (%d sizes) and other steps of up to %d tokens (%d sizes, %d"
            " graphs each) in %.1f s, %.0f MiB; not captured: steps with more than %d rows of logits",
            max_running,
            len(self._decodes),
            max_tokens,
            len(self._mixed),
            len(self._mixed[0].graphs),
            perf_counter() - begin,
            taken / (1 << 20),
            max(self._mixed[-1].heads),
        )

    def run(
        self,
        packed: PackedStep,
        on_layer: Callable[[int], None] | None = None,
        feed: Feed | None = None,
        draws: Sequence[DrawParams] = (),
    ) -> torch.Tensor | None:
        """Replay `packed`: float32 logits [rows, vocab]; None if no size fits.

        Logits and `extras` are valid until the next call. on_layer, feed, draws: see ModelRunner.execute.
        """
        self.extras = Extras()
        step = self._size_for(packed, on_layer is not None)
        if step is None or (feed is not None and len(feed.tokens) > len(self._draws)):
            return None
        if not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()  # the host arrays are free again once the last copy has read them
        step.buffer.fill(packed, feed, draws)
        step.buffer.send()
        self._copied.record()
        if feed is not None and feed.tokens.data_ptr() != self._draws.data_ptr():
            self._draws[: len(feed.tokens)].copy_(feed.tokens)
        near_end = None
        for graph, layer in step.graphs:
            graph.replay()
            if layer is None:
                continue
            if near_end is None and layer >= self._near_end:
                near_end = next(self._near_ends)
                near_end.record()
            if on_layer is not None:
                on_layer(layer)
        rows = len(packed.logit_rows)
        if rows or len(step.heads) == 1:
            step.head(rows).replay()
        self.extras = Extras(self._draws[: len(draws)] if draws and step.buffer.size.draws else None, near_end)
        return self._logits[:rows]

    def _sizes(self, max_running: int, max_tokens: int, min_rows: int) -> tuple[list[StepSize], list[StepSize]]:
        """Sizes of mixed steps, and of decode steps, the smallest first."""
        from kvrail.engine.attention.cuda import programs_at_once, queries_of_a_block  # needs triton

        cache, dtype = self._cache, self._loaded.dtype
        layout, closed, rows = cache.layout, cache.slots is not None, max_running + VERIFIED_ROWS
        width, kv_heads = min(layout.pages_for(self._loaded.max_model_len), cache.num_pages), layout.num_kv_heads
        at_once = functools.partial(programs_at_once, cache.layer(0), dtype)

        def mixed(tokens: int) -> StepSize:
            queries, programs = queries_of_a_block(layout, dtype, tokens), at_once(min(tokens, max_running))
            return mixed_size(tokens, max_running, width, kv_heads, rows, queries, closed=closed, programs=programs)

        def decodes(rows: int) -> StepSize:
            return decode_size(rows, width, kv_heads, min_rows, closed=closed, programs=at_once(rows))

        return [*map(mixed, token_sizes(max_tokens))], [*map(decodes, batch_sizes(max_running))]

    def _size_for(self, packed: PackedStep, grouped: bool) -> _Captured | None:
        """The smallest size that holds a step; grouped: it reports its layers."""
        tokens, rows = len(packed.token_ids), len(packed.logit_rows)
        if not grouped and tokens == len(packed.plan) == rows:
            return next((step for step in self._decodes if step.buffer.size.extents.rows >= tokens), None)
        for step in self._mixed:
            size = step.buffer.size
            if size.extents.tokens >= tokens and size.logit_rows >= rows:
                return step
        return None

    def _capture(self, size: StepSize, cuts: set[int]) -> _Captured:
        """Run a step of padding, so that everything is compiled and allocated, then capture it.

        cuts: layers behind which one graph ends and the next begins; another one ends before the head.
        """
        buffer = StepBuffer(size, self._loaded.device)
        recorder = _Recorder(self._pool, self._stream)
        bodies: list[Any] = []
        try:
            for _ in range(2):
                self._compute(buffer, None, bodies.append)
            fewer = [rows for rows in self._heads if rows < size.logit_rows] if bodies else []
            for rows in fewer:
                self._compute_head(buffer, bodies[-1], rows)
            bodies.clear()
            torch.cuda.synchronize(self._loaded.device)

            def on_body(body: Any) -> None:
                if fewer:
                    bodies.append(body)
                    recorder.cut(None)

            with recorder.recording():
                self._compute(buffer, lambda layer: recorder.cut(layer) if layer in cuts else None, on_body)
            *graphs, (head, _) = recorder.graphs
            heads = {}
            for rows in fewer:
                with recorder.recording():
                    self._compute_head(buffer, bodies[0], rows)
                heads[rows], _ = recorder.graphs[-1]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ConfigError(f"steps cannot be captured ({error}); set eager") from error
        return _Captured(buffer, graphs, heads | {size.logit_rows or size.extents.tokens: head})

    def _compute(
        self,
        buffer: StepBuffer,
        on_layer: Callable[[int], None] | None,
        on_body: Callable[[Any], None] | None = None,
    ) -> None:
        """The captured part of a step: tokens that the step before drew, the model, draws."""
        from kvrail.engine.sampling.sampling_kernels import launch_draw  # needs triton

        take_fed(buffer.there.token_ids, self._draws, buffer.there.fed_rows)
        inputs = self._inputs(buffer, on_layer, on_body)
        logits = self._loaded.logits(inputs, self._logits[: inputs.num_rows])
        if draws := buffer.size.draws:
            launch_draw(logits[:draws], buffer.there.draws, self._draws[:draws])

    def _compute_head(self, buffer: StepBuffer, body: Any, rows: int) -> None:
        self._loaded.head(body, buffer.there.logit_rows[:rows], self._logits[:rows])

    def _inputs(
        self, buffer: StepBuffer, on_layer: Callable[[int], None] | None, on_body: Callable[[Any], None] | None
    ) -> StepInputs:
        cache, there, size = self._cache, buffer.there, buffer.size
        step = PagedStep.over(cache, there.data, size.extents.plan(), on_layer, on_body=on_body)
        rows = there.logit_rows if size.logit_rows else 0
        return StepInputs(there.token_ids, there.positions, rows, size.logit_rows or size.extents.tokens, step)


class _Recorder:
    """Captures the work that one thread enqueues as several graphs, one after the other.

    A tensor may be made in one graph and used in later ones: while the captured code holds it, the pool does not reuse
    its memory, and replays run in the same order.
    """

    def __init__(self, pool: "torch.cuda._POOL_HANDLE", stream: torch.cuda.Stream) -> None:
        self.graphs: list[tuple[torch.cuda.CUDAGraph, int | None]] = []
        self._pool = pool
        self._stream = stream
        self._open: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture the block. An error ends the capture, and its graphs cannot be used."""
        with torch.cuda.stream(self._stream):
            self._begin()
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the first error is the cause
                    if self._open is not None:
                        self._open.capture_end()
                raise
            self._end(None)

    def cut(self, layer: int | None) -> None:
        """End one graph, behind `layer` if it is not None, and begin the next."""
        self._end(layer)
        self._begin()

    def _begin(self) -> None:
        self._open = torch.cuda.CUDAGraph()
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self, layer: int | None) -> None:
        graph, self._open = self._open, None
        assert graph is not None
        graph.capture_end()
        self.graphs.append((graph, layer))


def batch_sizes(max_running: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, … and last `max_running`."""
    sizes = (1, 2, 4, 8, *range(16, 64, 16), 64, *range(96, max_running, 32))
    return [*(size for size in sizes if size < max_running), max_running]


def token_sizes(max_tokens: int) -> list[int]:
    """Numbers of tokens, and last `max_tokens`; from 512, eight between powers of two, which prompts often have."""
    sizes = [32, 64]
    while sizes[-1] < max_tokens:
        sizes.append(sizes[-1] + max(64, 1 << sizes[-1].bit_length() - 4))
    return [*(size for size in sizes if size < max_tokens), max_tokens]
