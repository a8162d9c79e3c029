"""Log probabilities of a prompt's tokens, from the logits of the tokens before them.

A step computes such logits for a bounded number of tokens, and what is made of them here is made in pieces, so that a
long prompt never has its whole [tokens, vocabulary] in memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrail.engine.events import PromptScored
from kvrail.engine.logprobs import likeliest
from kvrail.engine.readback import Readback
from kvrail.engine.sequence import Sequence as Seq
from kvrail.engine.sequence import Status
from kvrail.sampling import PromptLogprobs

PIECE_ROWS = 32
"""Rows that are worked on at once: 19 MiB of float32 log probabilities with 152,000 tokens, and a few times that."""
PIECE_ENTRIES = 1024
"""Log probabilities in one event: whoever takes it is done with it in some milliseconds."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Some of a prompt's tokens in a step. first: the number of the first of them; its row of logits is `row`."""

    sequence: Seq
    first: int
    token_ids: Sequence[int]
    row: int

    @property
    def top(self) -> int:
        """Of how many most likely tokens to tell."""
        return self.sequence.params.prompt_logprobs or 0


class Scores:
    """Log probabilities on their way to the host."""

    def __init__(self, logits: Tensor, wanted: Sequence[Scoring]) -> None:
        """logits: float32 [R, V] of a step; not read any more once what is enqueued here has run."""
        self._wanted = wanted
        self._found = [tuple(map(Readback, _score(logits, each))) for each in wanted]

    def wait(self) -> list[PromptLogprobs]:
        """Those of each prompt, once they are here."""
        return [
            PromptLogprobs(each.first, logprobs.wait(), ranks.wait(), each.top, ids.wait(), tops.wait())
            for each, (logprobs, ranks, ids, tops) in zip(self._wanted, self._found, strict=True)
        ]


def _score(logits: Tensor, wanted: Scoring) -> list[Tensor]:
    """Log probabilities float32 [T], ranks int64 [T], and the most likely tokens' ids and log probabilities [T × top].

    Of equally likely tokens the lower id comes first.
    """
    count = len(wanted.token_ids)
    targets = torch.tensor(wanted.token_ids, dtype=torch.int64, pin_memory=logits.is_cuda)
    targets = targets.to(logits.device, non_blocking=True)
    pieces = []
    for begin in range(0, count, PIECE_ROWS):
        end = min(begin + PIECE_ROWS, count)
        logprobs = torch.log_softmax(logits[wanted.row + begin : wanted.row + end], dim=-1)
        target = targets[begin:end, None]
        chosen = logprobs.gather(1, target)
        ids = torch.arange(logprobs.shape[1], device=logits.device)
        before = (logprobs > chosen) | ((logprobs == chosen) & (ids < target))
        top = likeliest(logprobs, min(wanted.top, logprobs.shape[1]))
        pieces.append((chosen[:, 0], 1 + before.sum(dim=1), top.flatten(), logprobs.gather(1, top).flatten()))
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def told(wanted: Sequence[Scoring], found: Sequence[PromptLogprobs]) -> tuple[list[tuple[str, PromptScored]], set[str]]:
    """Events that tell of a step's log probabilities, and ids of the requests for which there are none: NaN.

    Takes note of it in the sequences.
    """
    events: list[tuple[str, PromptScored]] = []
    broken: set[str] = set()
    for each, logprobs in zip(wanted, found, strict=True):
        sequence = each.sequence
        if sequence.status is Status.FINISHED:
            continue
        if any(map(math.isnan, logprobs.logprobs)):
            broken.add(sequence.request_id)
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
