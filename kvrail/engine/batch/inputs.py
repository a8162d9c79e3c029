"""From packed arrays to the tensors of one forward pass, on the device in one copy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrail.engine.attention.meta import Extents, StepMeta
from kvrail.engine.attention.shares import shares_of
from kvrail.engine.attention.step import PagedStep
from kvrail.engine.batch.batch import Feed
from kvrail.engine.batch.packing import Ints, PackedStep, query_blocks
from kvrail.engine.kv.cache import PagedCache

_ALIGN = 16
ROWS = 4
"""On a CPU a step's rows are padded to a multiple of this: linear layers give a row the same bits beside any other
rows, but not alone."""
CUDA_ROWS = 32
"""Fewest rows of a batch-invariant step on CUDA. With fewer rows, products give a row the same bits too, but take up to
nine times as long (docs/decisions/0019-invariant-cuda.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The inputs of one forward pass. token_ids, positions: int64 [tokens], the step's own first, then padding.

    logit_rows: int64, the tokens whose logits are wanted, padding behind the first `num_rows`; or 0: all tokens.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor | int
    num_rows: int
    step: PagedStep


def step_inputs(
    cache: PagedCache,
    packed: PackedStep,
    dtype: torch.dtype,
    on_layer: Callable[[int], None] | None = None,
    feed: Feed | None = None,
    min_rows: int = 0,
) -> StepInputs:
    """Inputs of `packed` over the pages of `cache`, for a model that computes in `dtype`.

    On a CPU rows are padded to a multiple of ROWS, so that a token's float32 results are batch-invariant. min_rows: on
    CUDA, the fewest tokens and logits; fewer are padded to this.
    """
    if cache.device.type == "cuda":
        return _cuda_inputs(cache, packed, dtype, on_layer, feed, min_rows)
    arrays = [_padded(array, -len(array) % ROWS) for array in (packed.token_ids, packed.positions, packed.logit_rows)]
    ids, positions, rows = (torch.from_numpy(array) for array in arrays)
    if feed is not None:
        take_fed(ids, feed.tokens, torch.tensor(feed.rows))
    meta = StepMeta(
        slots=torch.from_numpy(packed.slots.astype(np.int32)),
        page_tables=torch.from_numpy(packed.page_tables.astype(np.int32)),
        plan=[(new, total) for new, total in packed.plan.tolist()],
        closed_tokens=None if packed.closed_tokens is None else torch.from_numpy(packed.closed_tokens),
    )
    none = torch.zeros(0, dtype=torch.int64)
    step = PagedStep.over(cache, none, none, on_layer, meta)
    return StepInputs(ids, positions, rows, len(packed.logit_rows), step)


def _cuda_inputs(
    cache: PagedCache,
    packed: PackedStep,
    dtype: torch.dtype,
    on_layer: Callable[[int], None] | None,
    feed: Feed | None,
    min_rows: int,
) -> StepInputs:
    # Needs triton, which a CPU worker does not.
    from kvrail.engine.attention.cuda import programs_at_once, queries_of_a_block

    tokens = max(min_rows, len(packed.token_ids))
    blocks = query_blocks(packed, queries_of_a_block(cache.layout, dtype, tokens), tokens)
    extents = Extents(
        tokens=tokens,
        sequences=len(packed.page_tables),
        width=packed.page_tables.shape[1],
        rows=packed.decodes,
        blocks=len(blocks),
        kv_heads=cache.layout.num_kv_heads,
        closed=packed.closed_tokens is not None,
    )
    data = np.zeros(extents.words(), np.int32)
    fill_meta(extents.sections(data), packed, blocks, programs_at_once(cache.layer(0), dtype, packed.decodes))
    fed = np.asarray(feed.rows if feed else (), np.int64)
    arrays = (
        _padded(array, max(0, size - len(array)))
        for array, size in (
            (packed.token_ids, tokens),
            (packed.positions, tokens),
            (packed.logit_rows, min_rows if len(packed.logit_rows) else 0),
        )
    )
    ids, positions, rows, fed_rows, on_device = upload([*arrays, fed, data], cache.device)
    if feed is not None:
        take_fed(ids, feed.tokens, fed_rows)
    step = PagedStep.over(cache, on_device, extents.plan(), on_layer)
    return StepInputs(ids, positions, rows, len(packed.logit_rows), step)


def take_fed(token_ids: torch.Tensor, drawn: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the first of `token_ids`, int64 [tokens], by drawn[rows]; `rows`: int64, -1 leaves a token as it is.

    A token that was not drawn becomes token 0; its request is about to fail.
    """
    known = token_ids[: len(rows)]
    torch.where(rows < 0, known, drawn[rows.clamp(min=0)].clamp(min=0), out=known)


def fill_meta(meta: StepMeta, packed: PackedStep, blocks: Ints, programs: int) -> None:
    """Write a step into sections on the host, which may be longer; the rest of them becomes padding.

    programs: how many compute sequences with one new token at once.
    """
    rows, tokens = packed.decodes, len(packed.token_ids)
    sequences, width = packed.page_tables.shape
    meta.slots[:rows] = -1  # attention over one new token stores its KV itself
    meta.slots[rows:tokens] = packed.slots[rows:]
    meta.slots[tokens:] = -1
    meta.page_tables[:sequences, :width] = packed.page_tables
    meta.kv_lens[:rows] = packed.plan[:rows, 1]
    meta.kv_lens[rows:] = 0
    fill_shares(meta, programs)
    meta.blocks[: len(blocks)] = blocks
    meta.blocks[len(blocks) :] = 0
    if packed.closed_tokens is not None:
        meta.closed_tokens[:sequences] = packed.closed_tokens
        meta.closed_tokens[sequences:] = 0


def fill_shares(meta: StepMeta, programs: int) -> None:
    """Write the shares of the sequences whose lengths are there. programs: see `fill_meta`."""
    if rows := len(meta.kv_lens):
        meta.shares[:] = shares_of(meta.kv_lens, len(meta.counters) // rows, programs)


def upload(arrays: Sequence[npt.NDArray[np.generic]], device: torch.device) -> list[torch.Tensor]:
    """Tensors with the arrays' contents on `device`, a CUDA device: one asynchronous copy from pinned memory."""
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


def _padded(array: Ints, zeros: int) -> Ints:
    """`array` with `zeros` zeros behind it."""
    return np.pad(array, (0, zeros))
