"""Log probabilities of drawn tokens and of the most likely ones, of the model's own logits (vLLM's `raw_logprobs`).

Those of a prompt token come from the logits of the token before it. A step computes them for a bounded number of tokens
and in pieces, so that a long prompt never has its whole [tokens, vocabulary] in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrail.engine.batch.readback import Readback, to_list
from kvrail.engine.schedule.scoring import Scoring
from kvrail.values.sampling import PromptLogprobs, TokenLogprobs


def token_logprobs(
    logits: Tensor, chosen: Sequence[int], counts: Sequence[int], named: Sequence[Sequence[int]] = ()
) -> list[TokenLogprobs]:
    """Return for each row the chosen token's log probability and those of the `count` most likely tokens.

    logits: float32 [R, V], before bias, penalties and temperature. Of equally likely tokens the lower id comes first.
    named: of each row token ids of the vocabulary whose log probabilities are returned instead, if there are any.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = to_list(logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0])
    top_ids, top_values = _top(logprobs, min(max(counts), logits.shape[1]))
    ranked = [
        sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for ids, values in zip(to_list(top_ids), to_list(top_values), strict=True)
    ]
    found = [
        TokenLogprobs(logprob, tuple(top[:count]))
        for logprob, top, count in zip(of_chosen, ranked, counts, strict=True)
    ]
    for row, token_ids in enumerate(named):
        if token_ids:
            values = to_list(logprobs[row, torch.tensor(token_ids, device=logits.device)])
            found[row] = TokenLogprobs(of_chosen[row], tuple(zip(token_ids, values, strict=True)))
    return found


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the `count` largest of each row, [R, count] each; among equals, the lower ids."""
    top = torch.topk(values, count, dim=1)
    if count and bool(((values >= top.values[:, -1:]).sum(dim=1) > count).any()):
        ids = likeliest(values, count)  # in some row, equal values compete for the last place
        return ids, values.gather(1, ids)
    return top.indices, top.values


def likeliest(values: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest values of each row, int64 [R, count], ties by lower id.

    Value and id share one integer key, so no two keys are equal and topk has no choice to make.
    """
    size = values.shape[1]
    bits = values.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(size, device=values.device)
    keys = (ordered << 32) + (size - 1 - ids)
    return size - 1 - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)


PIECE_ROWS = 32
"""Rows computed at once: 19 MiB of float32 log probabilities for 152,000 tokens, and temporaries a few times that."""


class Scores:
    """Log probabilities that are being copied to the host."""

    def __init__(self, logits: Tensor, wanted: Sequence[Scoring]) -> None:
        """logits: float32 [R, V] of a step; read by the work that is enqueued here, not later."""
        self._wanted = wanted
        self._found = [tuple(map(Readback, _score(logits, each))) for each in wanted]

    def wait(self) -> list[PromptLogprobs]:
        """Wait for them: one result a prompt."""
        return [
            PromptLogprobs(each.first, logprobs.wait(), ranks.wait(), each.top, ids.wait(), tops.wait())
            for each, (logprobs, ranks, ids, tops) in zip(self._wanted, self._found, strict=True)
        ]


def _score(logits: Tensor, wanted: Scoring) -> list[Tensor]:
    """Log probabilities float32 [T], ranks int64 [T], and the most likely tokens' ids and log probabilities [T × top].

    Among equally likely tokens, lower ids come first.
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
