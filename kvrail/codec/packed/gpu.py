"""Products with packed weights on an NVIDIA GPU, and the weights unpacked there."""

import ctypes
from functools import cache
from typing import Any

import torch

from kvrail.codec.packed.builds import Build, done, product_kernel, unpack_kernel
from kvrail.codec.packed.form import STRIP_ROWS, PackedWeight

MOST_TOKENS = 64
"""Of products that read the weight as it lies, 32 at a time. For more, unpacking it first is the shorter way."""
_AT_ONCE = 32
_SHAPES = ((24, 4, 2), (18, 3, 3), (16, 2, 3), (15, 5, 3))
"""Producers, strips and stages to choose from; the first of equals, as measured on an H200."""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_UNPACKING_BLOCKS = 8
"""Of `unpack`, for each multiprocessor."""


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What torch.nn.functional.linear gives, with the weight packed: bfloat16 [tokens, rows].

    x: bfloat16 [tokens, columns], contiguous, on the weight's device. bias: bfloat16 [rows]. The bits are those of
    cuBLASLt where it does not split sums and gets at least 32 tokens.
    """
    tokens = len(x)
    if tokens > MOST_TOKENS:
        return torch.nn.functional.linear(x, unpack(weight), bias)
    out = torch.empty(tokens, weight.rows, dtype=torch.bfloat16, device=x.device)
    for at in range(0, tokens, _AT_ONCE):
        _launch(x[at : at + _AT_ONCE], weight, bias, out[at : at + _AT_ONCE])
    return out


def prepare(weight: PackedWeight) -> None:
    """Compile and load what products with a weight of this shape need; nothing of it can be done during a capture."""
    device = weight.blocks.device
    for tokens in (8, 16, _AT_ONCE):
        product_kernel(device, _plan(device, weight.rows, tokens)[0])
    unpack_kernel(device)


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], bit for bit as it was packed."""
    device = weight.blocks.device
    out = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=device)
    blocks = _UNPACKING_BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
    pointers = (weight.blocks, weight.index, weight.counts, weight.shifts, out)
    arguments = [*(part.data_ptr() for part in pointers), weight.rows, weight.columns]
    _start(unpack_kernel(device), blocks, 256, 0, device, arguments, [_POINTER] * 5 + [_INT] * 2)
    return out


def _launch(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    tokens, device = len(x), x.device
    build, blocks = _plan(device, weight.rows, tokens)
    given = _tensor_map(x, 8 * build.token_tiles)
    parts = (weight.blocks, weight.index, weight.counts, weight.scales)
    added = 0 if bias is None else bias.data_ptr()
    pointers = [*(part.data_ptr() for part in parts), given, added, out.data_ptr()]
    arguments = [*pointers, weight.rows, weight.columns, tokens]
    types = [_POINTER] * 4 + [None] + [_POINTER] * 2 + [_INT] * 3
    _start(product_kernel(device, build), blocks, build.threads, build.shared_bytes, device, arguments, types)


@cache
def _plan(device: torch.device, rows: int, tokens: int) -> tuple[Build, int]:
    """The build for a product, and its number of blocks: those that leave multiprocessors the least to wait for."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    strips = rows // STRIP_ROWS

    def turns(each: int) -> int:
        return -(-strips // each)

    producers, each, stages = min(_SHAPES, key=lambda shape: -(-turns(shape[1]) // processors) * shape[1])
    tiles = next(tiles for tiles in (1, 2, 4) if tokens <= 8 * tiles)
    return Build(tiles, producers, each, stages), min(processors, turns(each))


def _tensor_map(x: torch.Tensor, tokens: int) -> Any:
    """How the copy engine finds 64 columns of so many tokens, and swizzles them on their way."""
    from cuda.bindings import driver

    rows, columns = x.shape
    return done(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            x.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(2 * columns)],
            [driver.cuuint32_t(64), driver.cuuint32_t(tokens)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _start(
    kernel: Any, blocks: int, threads: int, shared: int, device: torch.device, arguments: list[Any], types: list[Any]
) -> None:
    from cuda.bindings import driver

    stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
    given = (tuple(arguments), tuple(types))
    done(driver.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, given, 0))
