"""Log probabilities of drawn tokens and of the most likely ones, of the model's own logits (vLLM's `raw_logprobs`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrail.engine.readback import to_list
from kvrail.sampling import TokenLogprobs


def token_logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row the chosen token's log probability and those of the `count` most likely tokens.

    logits: float32 [R, V], before bias, penalties and temperature. Of equally likely tokens the lower id comes first.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = to_list(logprobs.gather(1, torch.tensor(chosen, device=logits.device)[:, None])[:, 0])
    top_ids, top_values = _top(logprobs, min(max(counts), logits.shape[1]))
    ranked = [
        sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        for ids, values in zip(to_list(top_ids), to_list(top_values), strict=True)
    ]
    return [
        TokenLogprobs(logprob, tuple(top[:count]))
        for logprob, top, count in zip(of_chosen, ranked, counts, strict=True)
    ]


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and values of the `count` largest of each row, [R, count] each; of equal ones the lower ids."""
    top = torch.topk(values, count, dim=1)
    if count and bool(((values >= top.values[:, -1:]).sum(dim=1) > count).any()):
        ids = likeliest(values, count)  # some row's last place is disputed
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
