"""What the scheduler hands to the data plane for one step: plain integers, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrail.values.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: the tokens to compute and where their KV goes.

    token_ids: the new tokens; the KV of the `start` tokens before them is in the pages already.
    page_table: pages of the sequence in order, enough for `start + len(token_ids)` tokens.
    num_logits: of how many of the new tokens, the last ones, the logits are needed: 0 for all but the last chunk of a
    prompt, 1 for a token of decoding, more where drafts are verified.
    copied_page: where the KV of the page that holds token `start` is copied from, before anything is computed.
    """

    token_ids: Sequence[int]
    start: int
    page_table: Sequence[int]
    num_logits: int
    copied_page: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the sampler needs to know to draw one token from one row of logits.

    position: index in the whole sequence of the token to be drawn (prompt length + tokens generated so far); together
    with the seed and `index`, the number of the sequence among the request's n, it keys the random draw.
    banned: token ids that must not be drawn (end-of-sequence and stop tokens before min_tokens).
    """

    params: SamplingParams
    index: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned: tuple[int, ...] = ()


NOT_DRAWN = -1
"""In place of a token id: the row's logits hold NaN, or no finite maximum."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token, or NOT_DRAWN; logprobs where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Tokens that the host need not know: the one new token of the first len(rows) slices is tokens[rows[i]].

    tokens: what the step before drew, int64 [its draws] on the device.
    """

    tokens: Any
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What a step gives beside its logits, as long as they are valid; None: not this step.

    drawn: token ids that it draws by itself, int64 [rows] on the device. near_end: the event that little of it is left.
    """

    drawn: Any = None
    near_end: Any = None


class Drawing(Protocol):
    """Draws under way. tokens: the drawn ids on the device, int64 [rows], or None where only the host has them."""

    @property
    def tokens(self) -> Any:
        """See above."""
        ...

    def wait(self) -> list[SampledToken]:
        """The tokens, once they are here: one a row."""
        ...
