"""Captured steps on a CPU: a step that a GPU replays is computed again, over a model whose pages hold token ids.

The runner, the sizes, the buffers and the order of launches are those that serve on a GPU; only CUDA is replaced. The
model's logits behind a token are a function of all tokens that its page table leads to (mixes/machine.py). So any
mistake in pages, buffers, rows or draws changes the output, and equal tokens always give equal logits.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from kvrail.engine.attention import cuda
from kvrail.engine.attention.meta import decode
from kvrail.engine.batch.batch import NOT_DRAWN
from kvrail.engine.batch.inputs import StepInputs
from kvrail.engine.batch.readback import Readback
from kvrail.engine.sampling import sampler, sampling_kernels
from kvrail.engine.sampling.draw import DrawParams, draw_on_cpu
from kvrail.engine.step import graphs
from kvrail.engine.step.buffers import StepBuffer, StepSize
from kvrail.engine.step.graphs import StepGraphs
from kvrail.engine.step.runner import ModelRunner
from kvrail.values.layout import KVLayout
from tests.engine.mixes.machine import logits_of
from tests.models import VOCAB

MAX_LEN = 96
QUERIES = 16
"""Queries of a block, as kernels take them."""


class TokenModel:
    """Stands in for LoadedModel. Pages hold token ids: the only key of the first layer."""

    def __init__(self, page_size: int) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.layers = [torch.nn.Identity()] * 2
        self.layout = KVLayout(2, 1, 1, 1, page_size, "float32")
        self.model = torch.nn.Identity()
        self.vocab_size = VOCAB
        self.max_model_len = MAX_LEN
        self.least_rows = 0

    def logits(self, inputs: StepInputs, out: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [rows, VOCAB]; rows that are padding hold NaN."""
        step, size = inputs.step, self.layout.page_size
        cells = step.pages[0][0].view(-1)
        ids, positions = inputs.token_ids.tolist(), inputs.positions.tolist()
        reads = self._cpu_reads(step.meta) if step.meta else self._cuda_reads(decode(step.data, step.plan))
        for token, (table, position) in reads.items():
            assert positions[token] == position, "a token stands elsewhere than its page table says"
            cells[table[position // size] * size + position % size] = ids[token]
        found = torch.full((len(ids), VOCAB), torch.nan)
        for token, (table, position) in reads.items():
            before = step.pages[0][0].view(-1, size)[table].view(-1)[: position + 1]
            found[token] = torch.from_numpy(logits_of(tuple(int(each) for each in before.tolist())))
        for layer in range(len(self.layers)):
            if step.on_layer is not None:
                step.on_layer(layer)
        if step.on_body is not None:
            step.on_body(found)
        logits = found if isinstance(inputs.logit_rows, int) else found[inputs.logit_rows]
        return logits if out is None else out.copy_(logits)

    @staticmethod
    def head(body: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(body[rows])

    @staticmethod
    def _cpu_reads(meta) -> dict[int, tuple[list[int], int]]:
        reads, token = {}, 0
        for table, (new, total) in zip(meta.page_tables.tolist(), meta.plan, strict=True):
            for position in range(total - new, total):
                reads[token] = table, position
                token += 1
        return reads

    @staticmethod
    def _cuda_reads(meta) -> dict[int, tuple[list[int], int]]:
        """Each token's page table and position, as attention's kernels find them."""
        tables = meta.page_tables.tolist()
        reads = {row: (tables[row], total - 1) for row, total in enumerate(meta.kv_lens.tolist()) if total}
        for first, count, position, table in meta.blocks.tolist():
            if table >= 0:
                reads |= {first + i: (tables[table], position + i) for i in range(count)}
        return reads


class CapturedRunner(ModelRunner):
    """A runner whose steps are launched as on a GPU."""

    launches_async = True

    def __init__(self, num_pages: int, page_size: int, **limits: int) -> None:
        super().__init__(TokenModel(page_size), num_pages, **limits)
        self._graphs = StepGraphs(self.loaded, self.cache, self.max_running, self._max_tokens)


class Event:
    def query(self) -> bool:
        return True

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Stream:
    def __init__(self, device: torch.device) -> None:
        pass


def capture(self: StepGraphs, size: StepSize, cuts: set[int]) -> graphs._Captured:
    """In place of graphs: compute the step again, into the same memory. Only the head that follows writes logits."""
    buffer, rows, bodies = StepBuffer(size, torch.device("cpu")), size.logit_rows or size.extents.tokens, []

    def compute() -> None:
        bodies.clear()
        self._compute(buffer, None, bodies.append)
        if size.logit_rows:
            self._logits.fill_(torch.nan)

    parts = [SimpleNamespace(replay=compute), *(SimpleNamespace(replay=lambda: None) for _ in cuts)]
    heads = {rows: SimpleNamespace(replay=lambda: None)}
    if size.logit_rows:
        heads = {
            most: SimpleNamespace(
                replay=functools.partial(lambda most: self._compute_head(buffer, bodies[0], most), most)
            )
            for most in (*(few for few in self._heads if few < rows), rows)
        }
    return graphs._Captured(buffer, list(zip(parts, [*sorted(cuts), None], strict=True)), heads)


def launch_draw(logits: torch.Tensor, words: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel's draw, from the words that it reads."""
    floats = words.view(torch.float32)
    for row in range(len(out)):
        k0, k1 = (int(word) & 0xFFFFFFFF for word in words[row, :2])
        temperature, depth, top_p = (float(floats[row, i]) for i in (2, 3, 5))
        params = DrawParams(temperature, int(words[row, 4]), top_p, -depth, (k0, k1))
        sound = not logits[row].isnan().any()
        out[row] = draw_on_cpu(logits[row : row + 1], [params])[0] if sound else NOT_DRAWN


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace capture and replay."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(cuda, "queries_of_a_block", lambda layout, dtype, tokens: QUERIES)
    monkeypatch.setattr(cuda, "programs_at_once", lambda layer, dtype, rows: 4)
    monkeypatch.setattr(sampling_kernels, "launch_draw", launch_draw)
    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(graphs, "HEADS", (1, 2, 4))
    monkeypatch.setattr(sampler, "Readback", lambda tensor: Readback(tensor.clone()))  # enqueued before the next step
