"""Batch invariance: a token gets the same bits whatever else a step computes. Choice of kernels, and trial at start.

Attention keeps one order of sums by construction (`attention.order`; on a CPU `attention.cpu_kernel`); norms and
elementwise operations work by row. Products of matrices remain, which libraries compute differently for different
numbers of rows. On CUDA, cuBLASLt that may not split the inner dimension gives a row of bfloat16 the same bits among
any others (docs/decisions/0019-invariant-cuda.md). That is an observation, not a contract. So each worker tries it at
its start, with the model and the kernels that will serve.
"""

import hashlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.linear import linear_layers
from kvrail.engine.model.loader import LoadedModel

if TYPE_CHECKING:
    from kvrail.engine.step.runner import ModelRunner

logger = logging.getLogger(__name__)

_OTHERS = 40


@dataclass(frozen=True, slots=True)
class _Extent:
    """Tokens of the trial sequence; of these, tokens computed one by one in its middle, and tokens of compared logits.

    digested: tokens at its beginning whose KV is digested. Kernels that add in different orders may differ in few
    elements only, which a digest of few tokens could miss.
    """

    tokens: int
    singles: int
    tail: int
    digested: int


_EXTENTS = {"cpu": _Extent(48, 4, 4, 32), "cuda": _Extent(700, 20, 12, 640)}
"""On CUDA steps are quick, and 700 tokens are more than two parts of attention.order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a trial.

    numerics: a digest of the computed KV; workers with equal digests compute the same bits. Empty if output is not
    batch-invariant, or if that was not tried. reason: why it is empty.
    """

    numerics: str
    reason: str

    @property
    def holds(self) -> bool:
        """Whether output is batch-invariant."""
        return bool(self.numerics)


def choose_products(*, invariant: bool) -> None:
    """Choose CUDA's products: a row's bits do not depend on the number of rows, or whatever is fastest.

    The choice holds for the whole process; torch offers no narrower one.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt" if invariant else "default")
    allowed = (False, False) if invariant else (True, True)  # sums in the narrow type, and sums split among programs
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed


def check(runner: "ModelRunner", max_running: int, max_tokens: int) -> Finding:
    """Compute one sequence in three ways and compare every bit of its KV and of the logits at its end.

    The ways: token by token and in chunks, alone; in chunks beside other sequences; and with its end in one step, as
    drafts are verified. Overwrites pages. max_running, max_tokens: the bounds of a step.
    """
    loaded, cache = runner.loaded, runner.cache
    pages, extent = (cache.open_pages - 1) // 3, _EXTENTS[loaded.device.type]
    length = min(extent.tokens, loaded.max_model_len, pages * loaded.layout.page_size)
    if length < 4 * extent.tail or max_tokens < 2 * extent.tail:
        return Finding("", f"there is room for {length} tokens or steps of {max_tokens}, too few for a trial")
    trial = _Trial(runner, replace(extent, tokens=length), pages, max_running, max_tokens)
    ways = [
        trial.run(number, steps)
        for number, steps in enumerate((trial.singly(), trial.beside_others(), trial.at_once()))
    ]
    for way in ways[1:]:
        difference = ways[0].difference(way)
        if difference:
            return Finding("", f"{difference}; {_cause(loaded, max_tokens)}")
    return Finding(ways[0].digest(extent.digested), "")


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """One sequence's KV as bytes, [layers, tokens, bytes] of keys, values and scales; logits: float32 [rows, vocab]."""

    kv: list[torch.Tensor]
    logits: torch.Tensor

    def difference(self, other: "_Way") -> str:
        """Where the two differ, in words; empty if they do not."""
        for ours, theirs in zip(self.kv, other.kv, strict=True):
            unequal = (ours != theirs).any(-1)
            if unequal.any():
                layer, token = unequal.nonzero()[0].tolist()
                return f"the KV of token {token} in layer {layer} depends on what is computed beside it"
        rows = min(len(self.logits), len(other.logits))
        ours, theirs = (logits[-rows:].view(torch.int32) for logits in (self.logits, other.logits))
        return "" if torch.equal(ours, theirs) else "a token's logits depend on what is computed beside it"

    def digest(self, tokens: int) -> str:
        """Digest of the KV of the first `tokens` tokens."""
        digest = hashlib.blake2b(digest_size=8)
        for part in self.kv:
            digest.update(part[:, :tokens].cpu().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Part:
    """A step: tokens of the trial sequence, the number of them whose logits are kept, and other sequences beside it."""

    count: int
    logits: int = 0
    others: int = 0


class _Trial:
    """One sequence, and the ways to compute it."""

    def __init__(self, runner: "ModelRunner", extent: _Extent, pages: int, max_running: int, max_tokens: int) -> None:
        choice = random.Random(0)
        self._runner = runner
        self._extent = extent
        self._ids = [choice.randrange(runner.loaded.vocab_size) for _ in range(extent.tokens)]
        self._pages = pages
        self._others = min(_OTHERS, max_running - 1, max_tokens // 2)
        self._chunk = max_tokens - self._others

    def singly(self) -> Iterator[_Part]:
        """Chunks and single tokens, alone; the end token by token."""
        extent, begin = self._extent, len(self._ids) // 3
        yield from self._chunks(begin)
        yield from [_Part(1)] * extent.singles
        yield from self._chunks(len(self._ids) - begin - extent.singles - extent.tail)
        yield from [_Part(1, 1)] * extent.tail

    def beside_others(self) -> Iterator[_Part]:
        """The largest chunks that a step allows, beside others."""
        yield from self._chunks(len(self._ids) - 1, self._others)
        yield _Part(1, 1, self._others)

    def at_once(self) -> Iterator[_Part]:
        """Small chunks, then the end in one step beside few others."""
        tail = self._extent.tail
        yield from self._chunks(len(self._ids) - tail, size=97)
        yield _Part(tail, tail, min(3, self._others))

    def run(self, number: int, steps: Iterator[_Part]) -> _Way:
        """Compute it in pages of its own, the ones of this number."""
        pages, at, logits = range(number * self._pages, (number + 1) * self._pages), 0, []
        beside = self._runner.cache.open_pages - 1
        size = self._runner.loaded.layout.page_size
        for step in steps:
            own = SequenceSlice(self._ids[at : at + step.count], at, pages, step.logits)
            beside_it = [SequenceSlice([self._ids[i]], i % size, [beside], 1) for i in range(step.others)]
            logits.append(self._runner.execute([own, *beside_it])[: step.logits].clone())
            at += step.count
        return _Way(list(self._kv(pages, at)), torch.cat(logits))

    def _chunks(self, tokens: int, others: int = 0, size: int = 0) -> Iterator[_Part]:
        size = min(size or self._chunk, self._chunk)
        while tokens > 0:
            yield _Part(min(size, tokens), 0, others)
            tokens -= size

    def _kv(self, pages: range, tokens: int) -> Iterator[torch.Tensor]:
        for pool in self._runner.cache.as_block():
            own = pool[:, pages.start : pages.stop].flatten(1, 2)[:, :tokens].flatten(2)
            yield own.contiguous().view(torch.uint8).clone()


def _cause(loaded: LoadedModel, max_tokens: int) -> str:
    """The products that differ by themselves, or that none does."""
    found = list(_differing_products(loaded, max_tokens))
    if found:
        return f"products of these shapes do (in x out): {', '.join(found)}"
    if any("expert" in name for name, _ in loaded.model.named_modules()):
        return "its experts' products have as many rows as tokens chose them"
    return "no product by itself does"


def _differing_products(loaded: LoadedModel, max_tokens: int) -> Iterator[str]:
    """Shapes of linear layers whose first row differs between few rows and more."""
    tried = set()
    few = 32
    for _, _, module in linear_layers(loaded.model):
        rows, columns = int(module.in_features), int(module.out_features)  # type: ignore[arg-type]
        if (rows, columns) in tried:
            continue
        tried.add((rows, columns))
        x = torch.randn(max(few, max_tokens), rows, device=loaded.device, dtype=loaded.dtype)
        wanted = _first_row(module, x[:few])
        sizes = [size for size in (2 * few, 6 * few, 16 * few, len(x)) if size <= len(x)]
        if any(not torch.equal(_first_row(module, x[:size]), wanted) for size in sizes):
            yield f"{rows} x {columns}"


def _first_row(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(x)[0].view(torch.uint8)
