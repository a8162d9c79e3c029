"""Contexts whose KV went through a codec or lay in lossy pages, and what the model then predicts, by the engine."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from kvrail.codec.base import Block
from kvrail.engine.batch.batch import SequenceSlice
from kvrail.engine.model.loader import LoadedModel
from kvrail.engine.step.runner import ModelRunner
from kvrail.tools.quality.lossy import Lossy
from kvrail.worker.pages import paged_block

logger = logging.getLogger("kvrail.quality")

TELL_S = 3.0
"""So often a line says how far it has come, or as often as a context is done."""
STEP_TOKENS = 2048
"""A context is computed in steps of at most this many tokens."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a codec or a form of pages costs; means over all judged tokens.

    bits: a value. loss: in nats a token; error: standard error of its difference to the exact
    KV's, over contexts; 0 with one context. top1: share of tokens where the likeliest token is the exact KV's. kl: of
    the exact KV's distribution from this one's, in nats.
    """

    name: str
    bits: float
    loss: float
    error: float
    top1: float
    kl: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """loss: with exact KV. key_spreads: by layer, largest over median channel of a head's keys, of the worst head."""

    loss: float
    contexts: int
    key_spreads: tuple[float, ...]
    figures: tuple[Figures, ...]


class _Tally:
    """Sums of one row, a number a context."""

    def __init__(self) -> None:
        self.bits: list[float] = []
        self.losses: list[float] = []
        self.agreements: list[float] = []
        self.divergences: list[float] = []

    def figures(self, name: str, exact: Sequence[float]) -> Figures:
        differences = torch.tensor(self.losses, dtype=torch.float64) - torch.tensor(exact, dtype=torch.float64)
        error = (differences.std() / len(exact) ** 0.5).item() if len(exact) > 1 else 0.0
        return Figures(
            name, _mean(self.bits), _mean(self.losses), error, _mean(self.agreements), _mean(self.divergences)
        )


class Evaluator:
    """The engine over one context at a time, in pages of its own.

    Contexts have `context_tokens`, whole pages, and `next_tokens` follow.
    """

    def __init__(self, loaded: LoadedModel, context_tokens: int, next_tokens: int) -> None:
        layout = loaded.layout
        self._context, self._pages = context_tokens, range(layout.pages_for(context_tokens + next_tokens))
        self._step = min(STEP_TOKENS, max(context_tokens, next_tokens))
        self._runner = ModelRunner(
            loaded, len(self._pages), max_running=1, max_batch_tokens=self._step, cuda_graphs=False, compile=False
        )
        self.context = paged_block(
            self._runner.cache, range(layout.num_layers), range(layout.pages_for(context_tokens))
        )

    def prefill(self, tokens: Sequence[int]) -> Block:
        """Compute a context's KV; gives a copy of it."""
        for _ in self._run(tokens[: self._context], 0, logits=False):
            pass
        return self.context.gather()

    def predictions(self, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities after each of the tokens behind the context but the last, float32 [next_tokens, vocab].

        The context's KV is read from its pages as they are.
        """
        return torch.cat(list(self._run(tokens[self._context : -1], self._context, logits=True))).log_softmax(-1)

    def _run(self, tokens: Sequence[int], start: int, *, logits: bool) -> Iterator[torch.Tensor]:
        for at in range(0, len(tokens), self._step):
            piece = tokens[at : at + self._step]
            rows = len(piece) if logits else 0
            yield self._runner.execute([SequenceSlice(piece, start + at, self._pages, num_logits=rows)]).clone()


def measure(
    loaded: LoadedModel, windows: Sequence[Sequence[int]], context_tokens: int, given: Sequence[Lossy]
) -> Measurement:
    """What codecs and forms of pages cost; windows: token ids, each of a context, the tokens after it, and one more."""
    evaluator = Evaluator(loaded, context_tokens, len(windows[0]) - context_tokens - 1)
    tallies, exact_losses = [_Tally() for _ in given], []
    largest = torch.zeros(())
    reported = monotonic()
    logger.info("measuring %d contexts with %d codecs or forms of pages", len(windows), len(given))
    for number, window in enumerate(windows):
        exact = evaluator.prefill(window)
        truth = torch.tensor(window[context_tokens + 1 :], device=exact.keys.device)
        expected = evaluator.predictions(window)
        exact_losses.append(_loss(expected, truth))
        largest = torch.maximum(largest.to(exact.keys.device), exact.keys.abs().float().amax((1, 2)))
        for each, tally in zip(given, tallies, strict=True):
            tally.bits.append(each.pass_through(evaluator.context))
            found = evaluator.predictions(window)
            tally.losses.append(_loss(found, truth))
            tally.agreements.append((found.argmax(-1) == expected.argmax(-1)).double().mean().item())
            tally.divergences.append((expected.exp() * (expected - found)).sum(-1).double().mean().item())
            evaluator.context.scatter(exact)
        if monotonic() - reported > TELL_S:
            reported = monotonic()
            logger.info("measured %d of %d contexts", number + 1, len(windows))
    figures = tuple(tally.figures(each.name, exact_losses) for each, tally in zip(given, tallies, strict=True))
    return Measurement(_mean(exact_losses), len(windows), _spreads(largest), figures)


def _loss(predictions: torch.Tensor, truth: torch.Tensor) -> float:
    return -predictions.gather(-1, truth[:, None]).double().mean().item()


def _spreads(largest: torch.Tensor) -> tuple[float, ...]:
    """By layer; largest: the largest magnitude of each channel, float32 [layers, heads, dim]."""
    ratios = largest.amax(-1) / largest.median(-1).values.clamp_min(torch.finfo(torch.float32).tiny)
    return tuple(ratios.amax(-1).tolist())


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
