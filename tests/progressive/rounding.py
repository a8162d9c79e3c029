"""Whether bfloat16 arithmetic explains that an answer is another one: scores of its tokens, computed by transformers.

The token that is drawn has the largest score, logit + temperature * noise (kvrail/engine/noise.py); greedy, it has the
largest logit. In bfloat16 scores are off by what rounding does to them, which depends on how many tokens are computed
at once. So each token of an answer may lie below the best one of its place, by float32 logits of the same context, and
by no more than this:

- a logit of size x is rounded to a multiple of 2^(floor(log2 x) - 7), which moves it by half of that at most: half for
  the token, half for the best one;
- before that hidden states are rounded in every layer. What that does to logits is measured at the same place: it is
  the standard deviation over the vocabulary of transformers' logits in bfloat16 less those in float32. Two logits'
  difference has sqrt(2) of it, and DEVIATIONS of these are allowed.

All of an answer is judged: KV that is wrong may first show where two tokens happen to be near each other. KV that is
off by no more than rounding shows in float32 only, where no difference is allowed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.codec_data import DEMO
from kvrail.engine.noise import gumbel_noise, noise_key

DEVIATIONS = 5
"""Of a normal distribution 1 in 1.7 million is further away; a run judges some ten thousand tokens."""


@dataclass(frozen=True)
class Scores:
    """Of an answer's tokens, float32 [tokens] each. below: the best score less the token's; bound: of that."""

    below: torch.Tensor
    bound: torch.Tensor

    @property
    def worst(self) -> float:
        """The largest part of a bound that is taken; above 1, rounding does not explain the token."""
        return float((self.below / self.bound).max())


@dataclass(frozen=True)
class Parting:
    """Where an answer and raw's part.

    place: of the first token that differs; gap: between the scores of the two tokens there; bound: what rounding
    explains there; worst: of both whole answers.
    """

    place: int
    gap: float
    bound: float
    worst: float

    @property
    def is_tie(self) -> bool:
        return self.worst <= 1

    def __str__(self) -> str:
        return (
            f"token {self.place}, two scores {self.gap:.3f} apart where rounding explains {self.bound:.3f};"
            f" of any token at most {self.worst:.2f} times what it explains"
        )


def spacing(logits: torch.Tensor) -> torch.Tensor:
    """Between neighbouring bfloat16 numbers of that size."""
    return 2.0 ** (logits.abs().log2().floor() - 7)


class Rounding:
    """transformers' own forward pass of the demo model: `exact` in float32, `rounded` in bfloat16."""

    def __init__(self) -> None:
        self.exact, self.rounded = (
            AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)
        )
        self._known: dict[tuple, Scores] = {}

    def parting(self, prompt: list[int], ours: list[int], raws: list[int], **options) -> Parting:
        """Of two answers that differ. options: temperature and seed, none: greedy."""
        place = next(place for place, pair in enumerate(zip(ours, raws, strict=True)) if pair[0] != pair[1])
        one, other = (self.scores(prompt, tokens, **options) for tokens in (ours, raws))
        gap = float((one.below[place] - other.below[place]).abs())
        return Parting(place, gap, float(one.bound[place]), max(one.worst, other.worst))

    def scores(self, prompt: list[int], tokens: list[int], temperature: float = 0.0, seed: int = 0) -> Scores:
        """Of every token of an answer, each behind the tokens before it."""
        key = (*prompt, *tokens, temperature, seed)
        if key not in self._known:
            self._known[key] = self._judge(prompt, tokens, temperature, seed)
        return self._known[key]

    @torch.inference_mode()
    def _judge(self, prompt: list[int], tokens: list[int], temperature: float, seed: int) -> Scores:
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        exact, rounded = (
            model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
            for model in (self.exact, self.rounded)
        )
        scores = exact.clone()
        vocabulary = np.arange(exact.shape[1], dtype=np.uint32)
        for place, row in enumerate(scores):
            if temperature:
                key = noise_key(seed, 0, len(prompt) + place)
                row += temperature * torch.from_numpy(gumbel_noise(key, vocabulary))
        best, chosen = scores.argmax(1, keepdim=True), torch.tensor(tokens)[:, None]
        below = (scores.gather(1, best) - scores.gather(1, chosen))[:, 0]
        last = sum(spacing(exact.gather(1, each))[:, 0] / 2 for each in (best, chosen))
        return Scores(below, last + DEVIATIONS * 2**0.5 * (rounded - exact).std(1))
