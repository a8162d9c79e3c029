"""Drawing one token from each row of logits: the rules, and their CPU implementation.

Each filter is a threshold on the scaled logits s = (logit - row's maximum) / temperature, in the order of vLLM:

- min_p keeps s >= log(min_p);
- top_k keeps s >= the k-th largest s;
- top_p keeps, of those, the most likely whose mass reaches top_p of theirs.

A row with NaN, or without a finite maximum, gives NOT_DRAWN.

Tokens with equal logits are kept or dropped together. The mass is summed in integers, so neither the order of summation
nor the batch can move a threshold. Kept tokens get noise (kvrail.engine.sampling.noise); the largest sum wins, of equal
ones the lowest token id. A row's result is a function of that row alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrail.engine.batch.batch import NOT_DRAWN, SampleRow
from kvrail.engine.sampling.noise import gumbel_noise, noise_key

MASS_SCALE = 2.0**34
"""Mass of the most likely token as an integer; sums over 2^19 tokens stay exact in float64 too."""

BINS_A_UNIT, NUM_BINS = 32, 1024
"""Histogram of top_p: bins cover scores down to -32, where the integer mass has long been 0."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The parameters of one row's draw, beside its logits. temperature 0 is greedy; top_k 0 is off.

    min_score: log(min_p), rounded to float32; -inf is off. top_p: rounded to float32.
    """

    temperature: float
    top_k: int
    top_p: float
    min_score: float
    key: tuple[int, int]

    @classmethod
    def of(cls, row: SampleRow) -> "DrawParams":
        """The parameters of a row: its request's and its position."""
        params = row.params
        if params.greedy:
            return GREEDY
        return cls(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=float(np.float32(params.top_p)),
            min_score=float(np.float32(math.log(params.min_p))) if params.min_p > 0 else -math.inf,
            key=noise_key(params.seed, row.index, row.position),
        )


GREEDY = DrawParams(0.0, 0, 1.0, -math.inf, (0, 0))
WORDS = 6
"""Words of a row's parameters as a kernel reads them: see `draw_words`."""


def draw_words(params: Sequence[DrawParams]) -> npt.NDArray[np.int32]:
    """Parameters as int32 [R, WORDS]: k0, k1, temperature, depth of min_p, top_k, top_p, the floats by their bits."""
    words = np.empty((len(params), WORDS), dtype=np.int32)
    floats = words.view(np.float32)
    words[:, :2] = np.array([param.key for param in params], dtype=np.uint32).view(np.int32)
    floats[:, 2] = [param.temperature for param in params]
    floats[:, 3] = [abs(param.min_score) for param in params]
    words[:, 4] = [param.top_k for param in params]
    floats[:, 5] = [param.top_p for param in params]
    return words


def draw_on_cpu(logits: Tensor, params: Sequence[DrawParams]) -> list[int]:
    """Draw one token id from each row of `logits`, float32 [R, V] on the CPU."""
    token_ids = np.arange(logits.shape[1], dtype=np.uint32)
    return [_draw_row(row, param, token_ids) for row, param in zip(logits.numpy(), params, strict=True)]


def _draw_row(logits: npt.NDArray[np.float32], params: DrawParams, token_ids: npt.NDArray[np.uint32]) -> int:
    """Draw from one row, float32 [V]; token_ids is 0 … V-1."""
    best = int(logits.argmax())  # where there is NaN, one of those
    if not math.isfinite(logits[best]):
        return NOT_DRAWN
    if params.temperature == 0.0:
        return best
    scores = logits - logits[best]
    scores /= np.float32(params.temperature)
    threshold = keep_threshold(scores, params)
    if threshold > -math.inf:
        token_ids = np.flatnonzero(scores >= np.float32(threshold)).astype(np.uint32)
        scores = scores[token_ids]
    scores += gumbel_noise(params.key, token_ids)
    return int(token_ids[scores.argmax()])


def keep_threshold(scores: npt.NDArray[np.float32], params: DrawParams) -> float:
    """Return the score below which tokens are dropped; -inf where no filter applies."""
    threshold = params.min_score
    if 0 < params.top_k < len(scores):
        kth = torch.topk(torch.from_numpy(scores), params.top_k, sorted=False).values.min()
        threshold = max(threshold, float(kth))
    if params.top_p < 1.0:
        kept = scores[scores >= np.float32(threshold)] if threshold > -math.inf else scores
        threshold = max(threshold, _top_p_threshold(kept, params.top_p))
    return threshold


def _top_p_threshold(scores: npt.NDArray[np.float32], top_p: float) -> float:
    """Return the largest score at which the tokens at or above it hold `top_p` of the mass of `scores`, float32 [N].

    A histogram over depth finds the bin in which the mass is reached; only that bin's tokens are sorted.
    """
    mass = np.floor(np.exp(scores) * np.float32(MASS_SCALE)).astype(np.float64)  # integers, so sums are exact
    bins = np.minimum(scores * np.float32(-BINS_A_UNIT), np.float32(NUM_BINS - 1)).astype(np.intp)
    held = np.bincount(bins, weights=mass, minlength=NUM_BINS)
    reached = np.cumsum(held)
    needed = max(1, math.ceil(float(reached[-1]) * top_p))
    last = int(np.searchsorted(reached, needed))
    inside = np.flatnonzero(bins == last)
    inside = inside[np.argsort(-scores[inside])]
    reached_inside = reached[last] - held[last] + np.cumsum(mass[inside])
    return float(scores[inside[np.searchsorted(reached_inside, needed)]])
