"""How long this engine's steps take: a line through the measured seconds, by tokens or by sequences."""

import math
from dataclasses import dataclass

WEIGHT = 0.05
"""Weight of the newest step in the running means; the first steps weigh more."""
FULL_TOKENS = 128
"""Prompt tokens from which a step's time depends on its tokens, rather than on what any step takes."""
MIN_SPREAD = 0.15
"""Standard deviation of the sizes, as a share of their mean, below which they say nothing of the slope."""
WRONG = 1.5
"""If decoding alone was to take this much longer than a step with prompts too took, the line is wrong."""
EVEN_SEQUENCES = 32
"""Sequences that double the time of a step that decodes, until sizes have differed. What one sequence takes is mostly
what any step takes, the weights: 124 double it with Qwen3-8B's shape on an H200."""


@dataclass(frozen=True, slots=True)
class Line:
    """base: seconds of the smallest step. each: seconds that one more token or sequence adds. 0, 0: not measured."""

    base: float = 0.0
    each: float = 0.0

    def at(self, size: int) -> float:
        """Seconds of a step of this size."""
        return self.base + self.each * size


class LineFit:
    """Least squares over steps whose weight decays exponentially.

    While all steps have about one size, as in a steady load, the base stays that of the sizes before: what any step
    takes does not change, and a line through zero would say that half the size takes half the time. even: the size
    that takes twice the base, until sizes have differed; 0: the line goes through zero.
    """

    def __init__(self, even: int = 0) -> None:
        self._even, self._count = even, 0
        self._x = self._y = self._xx = self._xy = 0.0
        self._base: float | None = None  # until sizes have differed

    def note(self, size: int, seconds: float) -> None:
        """A step of `size` tokens or sequences took `seconds`."""
        self._count += 1
        weight = max(WEIGHT, 1 / self._count)
        self._x += weight * (size - self._x)
        self._y += weight * (seconds - self._y)
        self._xx += weight * (size * size - self._xx)
        self._xy += weight * (size * seconds - self._xy)
        spread = self._xx - self._x * self._x
        slope = (self._xy - self._x * self._y) / spread if spread > (MIN_SPREAD * self._x) ** 2 else 0.0
        if slope > 0:  # else larger steps took less time, or none was larger
            self._base = max(0.0, self._y - slope * self._x)

    @property
    def mean(self) -> float:
        """Seconds for one token or sequence; 0: not measured."""
        return self._y / self._x if self._count else 0.0

    def line(self) -> Line:
        """The line through the mean."""
        if not self._count:
            return Line()
        base = self._y * self._even / (self._even + self._x) if self._base is None else min(self._base, self._y)
        return Line(base, (self._y - base) / self._x)


class StepCostModel:
    """Cost of steps that compute prompts, by their tokens, and of steps that only decode, by their sequences.

    Of steps with both, what a token of a prompt adds is measured by itself: the first ones of a step cost little.
    """

    def __init__(self) -> None:
        self._prefill, self._full, self._beside = LineFit(), LineFit(), LineFit()
        self._decode = LineFit(EVEN_SEQUENCES)

    def note(self, prompt_tokens: int, sequences: int, seconds: float) -> None:
        """A step computed `prompt_tokens` and decoded `sequences` in `seconds`."""
        if prompt_tokens:
            if sequences and self.decode.at(sequences) > WRONG * seconds:
                # Decoding alone takes no longer, and no step may decode alone as long as prompts come.
                self._decode.note(sequences, seconds)
            decode = self.decode
            self._prefill.note(prompt_tokens, seconds)
            if prompt_tokens >= FULL_TOKENS:
                # The weights are read once for both: half of the time that any step takes.
                beside = decode.base / 2 + decode.each * sequences if sequences else 0.0
                self._full.note(prompt_tokens, max(0.0, seconds - beside))
            if sequences and (decoding := decode.at(sequences)):
                self._beside.note(prompt_tokens, max(0.0, seconds - decoding))
        elif sequences:
            self._decode.note(sequences, seconds)

    @property
    def prefill(self) -> Line:
        """Seconds of a step by its prompt tokens, whatever decodes beside them."""
        return self._prefill.line()

    @property
    def full_prefill(self) -> float:
        """Seconds a token of steps with many prompt tokens, without what decodes beside them; 0: not measured."""
        return self._full.mean

    @property
    def decode(self) -> Line:
        """Seconds of a step that only decodes, by its sequences."""
        return self._decode.line()

    def tokens_within(self, seconds: float, sequences: int) -> float:
        """Tokens of prompts in a step of `seconds` beside sequences that decode; infinite as long as not measured."""
        each = self._beside.mean
        return max(0.0, seconds - self.decode.at(sequences)) / each if each else math.inf
