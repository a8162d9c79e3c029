"""Applying packed masks to logits on the GPU: one launch, beside one copy of the masks from pinned memory."""

# Triton reads a kernel's parameters as tensors; it takes no other annotation of them.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvrail.engine.batch.inputs import upload
from kvrail.engine.sampling.masks import Masks


@triton.jit
def _mask_kernel(logits, words, of_rows, out, stride, width, vocab_size, BLOCK: tl.constexpr):
    """Grid (R, blocks of V). logits, out float32 [R, V]; words int32 [masks, width]; of_rows int32 [R], -1: no mask."""
    row, ids = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * stride + ids, mask=inside, other=0.0)
    mask = tl.load(of_rows + row)
    if mask >= 0:
        packed = tl.load(words + mask.to(tl.int64) * width + (ids >> 5), mask=inside, other=0)
        values = tl.where(((packed >> (ids & 31)) & 1) != 0, values, float("-inf"))
    tl.store(out + row * vocab_size + ids, values, mask=inside)


def mask_on_cuda(logits: Tensor, masks: Masks, block: int = 4096) -> Tensor:
    """`logits`, float32 [R, V], with -inf wherever a row's mask forbids the token; a new tensor."""
    rows, vocab_size = logits.shape
    out = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    arrays = [masks.words, masks.of_rows]
    words, of_rows = upload(arrays, logits.device) if logits.is_cuda else [torch.from_numpy(each) for each in arrays]
    grid = (rows, triton.cdiv(vocab_size, block))
    _mask_kernel[grid](logits, words, of_rows, out, logits.stride(0), words.shape[1], vocab_size, BLOCK=block)
    return out
