"""The tokens of a prompt that a step scores, and the events with their log probabilities."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.engine.request.events import PromptScored
from kvrail.engine.request.sequence import Sequence as Seq
from kvrail.engine.request.sequence import Status
from kvrail.values.sampling import PromptLogprobs

PIECE_ENTRIES = 1024
"""Log probabilities in one event: its reader is done with it in some milliseconds."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens of a prompt that a step scores. first: the first one's position; its row of logits is `row`."""

    sequence: Seq
    first: int
    token_ids: Sequence[int]
    row: int

    @property
    def top(self) -> int:
        """Number of most likely tokens to report."""
        return self.sequence.params.prompt_logprobs or 0


def prompt_scores(
    wanted: Sequence[Scoring], found: Sequence[PromptLogprobs]
) -> tuple[list[tuple[str, PromptScored]], list[Seq]]:
    """Events with a step's log probabilities, and the sequences for which some are NaN.

    Advances `scored` of the sequences.
    """
    events: list[tuple[str, PromptScored]] = []
    broken: list[Seq] = []
    for each, logprobs in zip(wanted, found, strict=True):
        sequence = each.sequence
        if sequence.status is Status.FINISHED:
            continue
        if any(map(math.isnan, logprobs.logprobs)):
            broken.append(sequence)
            continue
        sequence.scored = each.first + len(each.token_ids) - 1
        events += [(sequence.request_id, PromptScored(piece)) for piece in _pieces(logprobs)]
    return events, broken


def _pieces(whole: PromptLogprobs) -> list[PromptLogprobs]:
    """Pieces of at most PIECE_ENTRIES log probabilities."""
    top, size = whole.top, PIECE_ENTRIES // (1 + whole.top)
    return [
        PromptLogprobs(
            whole.first + begin,
            whole.logprobs[begin : begin + size],
            whole.ranks[begin : begin + size],
            top,
            whole.top_ids[begin * top : (begin + size) * top],
            whole.top_logprobs[begin * top : (begin + size) * top],
        )
        for begin in range(0, len(whole.logprobs), size)
    ]
