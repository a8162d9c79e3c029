"""One step as the scheduler hands it to the data plane: plain integers, no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrail.values.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's part of a step: the tokens to compute and where their KV goes.

    token_ids: the new tokens; the KV of the `start` tokens before them is in the pages already.
    page_table: pages of the sequence in order, enough for `start + len(token_ids)` tokens.
    num_logits: number of the last new tokens whose logits are needed: 0 for all but the last chunk of a prompt, 1 for a
    decoded token, more if drafts are verified.
    copied_page: page whose KV is copied into the page that holds token `start`, before anything is computed.
    closed: how many pages are read closed, behind those that their form keeps open at the beginning; all others are
    read open. None: pages are read open where they are open.
    """

    token_ids: Sequence[int]
    start: int
    page_table: Sequence[int]
    num_logits: int
    copied_page: int | None = None
    closed: int | None = None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The sampler's input, beside the logits, to draw one token from one row of them.

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
"""In place of a token id if the row's logits hold NaN or have no finite maximum."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One drawn token, or NOT_DRAWN; logprobs where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Tokens that the host need not know: the one new token of the first len(rows) slices is tokens[rows[i]].

    tokens: the draws of the step before, int64 [draws] on the device.
    """

    tokens: "torch.Tensor"
    rows: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """What a step gives beside its logits, valid as long as they are. None: this step gives none.

    drawn: token ids that it draws by itself, int64 [rows] on the device. near_end: the event that little of the step is
    left.
    """

    drawn: "torch.Tensor | None" = None
    near_end: "torch.cuda.Event | None" = None
