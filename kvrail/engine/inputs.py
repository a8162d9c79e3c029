"""From packed arrays to the tensors of one forward pass, on the device in one copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.attention.meta import StepMeta, decode, encode
from kvrail.engine.attention.step import PagedStep
from kvrail.engine.cache import PagedCache
from kvrail.engine.packing import Ints, PackedStep, token_slots

_ALIGN = 16
ROWS = 4
"""On a CPU a step's rows are padded to a multiple of this: linear layers give a row the same bits beside any others,
but not alone."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What one forward pass takes. token_ids, positions: int64 [tokens], padding behind the step's own.

    logit_rows: int64, the tokens whose logits are wanted, padding behind the first `num_rows`, or 0: all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor | int
    num_rows: int
    step: PagedStep


def step_inputs(
    cache: PagedCache, packed: PackedStep, dtype: torch.dtype, on_layer: Callable[[int], None] | None = None
) -> StepInputs:
    """Inputs of `packed` over the pages of `cache`, for a model that computes in `dtype`.

    On a CPU padded to a multiple of ROWS: there a token's float32 results do not depend on what else is computed.
    """
    prefills = packed.plan[packed.decodes :]
    new_is_all = cache.keys.dtype == dtype and bool((prefills[:, 0] == prefills[:, 1]).all())
    data, plan = encode(
        StepMeta(
            plan=packed.plan.tolist(),
            slots=packed.slots,
            kv_lens=packed.plan[:, 1],
            page_tables=packed.page_tables,
            cu_queries=_running_sum(prefills[:, 0]),
            cu_tokens=_running_sum(prefills[:, 1]),
            gather_slots=np.zeros(0, np.int64) if new_is_all else token_slots(packed, cache.layout.page_size),
            counters=np.zeros(packed.decodes * cache.layout.num_kv_heads, np.int64),
        )
    )
    on_cuda = cache.device.type == "cuda"
    multiple = 1 if on_cuda else ROWS
    arrays = [_padded(array, multiple) for array in (packed.token_ids, packed.positions, packed.logit_rows)]
    ids, positions, rows, on_device = upload([*arrays, data], cache.device)
    on_host = torch.from_numpy(plan)
    step = PagedStep(
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        on_device,
        on_host,
        on_layer,
        None if on_cuda else decode(on_device, on_host),
    )
    return StepInputs(ids, positions, rows, len(packed.logit_rows), step)


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """Tensors with the arrays' contents on `device`; on CUDA one asynchronous copy from pinned memory.

    On a CPU the tensors share the arrays' memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    offsets = [0]
    for a in arrays:
        offsets.append(offsets[-1] + -(-a.nbytes // _ALIGN) * _ALIGN)
    staging = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=True)
    flat = staging.numpy()
    for a, begin in zip(arrays, offsets, strict=False):
        flat[begin : begin + a.nbytes] = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
    on_device = staging.to(device, non_blocking=True)
    return [
        on_device[begin : begin + a.nbytes].view(getattr(torch, a.dtype.name)).view(a.shape)
        for a, begin in zip(arrays, offsets, strict=False)
    ]


def _padded(array: Ints, multiple: int) -> Ints:
    """Zeros behind `array`, up to a multiple."""
    return np.pad(array, (0, -len(array) % multiple))


def _running_sum(lengths: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)])
