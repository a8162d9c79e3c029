"""Launches of products with weights in fewer bytes, and of what gives them back as bfloat16."""

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kvrail.codec.fused.builds import Build, Form, done, product_kernel, unpack_kernel

MOST_TOKENS = 64
"""The most tokens of products that read the weight as it lies. For more, unpacking it first is faster."""
STRIP_ROWS = 16
_TOKEN_TILES = (1, 2, 4, 6, 8)
_MOST_SHARED = 227 << 10
"""Bytes of shared memory that a block may have."""
_SHAPES = ((24, 4, 2), (18, 3, 3), (16, 2, 3), (15, 5, 3))
_SHAPES_FOR_MANY = ((12, 4, 4), (12, 3, 3), (12, 2, 2), (15, 5, 3))
"""Producers, strips and stages to choose from, for up to four tiles of tokens and for more, in the order of preference
measured on an H200 and an H100 with compact weights. With many tokens, more warps would have too few registers.

Where the stages do not fit, because of many tokens or a form's scratch, there are fewer of them, at least two.
"""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_UNPACKING_BLOCKS = 8
"""Blocks of `unpack` for each multiprocessor."""


def multiply(form: Form, x: torch.Tensor, parts: list[int], rows: int, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of x, bfloat16 [up to 64 tokens, columns], contiguous, and a weight of `rows` rows: [tokens, rows].

    parts: arguments for the form's PARAMETERS. bias: bfloat16 [rows]. The bits are those of cuBLASLt where it does not
    split sums and gets at least 32 tokens.
    """
    (tokens, columns), device = x.shape, x.device
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=device)
    if not tokens:  # a step without logits
        return out
    build, blocks = _plan(form, device, rows, _tiles(tokens))
    given = _tensor_map(x, 8 * build.token_tiles)
    added = 0 if bias is None else bias.data_ptr()
    arguments = [*parts, given, added, out.data_ptr(), rows, columns, tokens]
    types = [*form.types, None, _POINTER, _POINTER, _INT, _INT, _INT]
    shared = build.shared_bytes(form.scratch)
    _start(product_kernel(device, form, build), blocks, build.threads, shared, device, arguments, types)
    return out


def prepare(form: Form, device: torch.device, rows: int) -> None:
    """Compile and load what products with a weight of `rows` rows need; a capture allows none of it."""
    for tiles in _TOKEN_TILES:
        product_kernel(device, form, _plan(form, device, rows, tiles)[0])
    unpack_kernel(device, form)


def unpack(form: Form, parts: list[int], out: torch.Tensor) -> torch.Tensor:
    """Fill `out`, bfloat16 [rows, columns], with the weight; parts: arguments for what comes first in `unpack`."""
    device = out.device
    blocks = _UNPACKING_BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
    arguments = [*parts, out.data_ptr(), *out.shape]
    types = [*form.types, _POINTER, _INT, _INT]
    _start(unpack_kernel(device, form), blocks, 256, form.unpack_shared, device, arguments, types)
    return out


def builds(form: Form, tiles: int) -> list[Build]:
    """Builds of `product` for `tiles` tiles of eight tokens."""
    fitting = []
    for producers, strips, stages in _SHAPES if tiles <= 4 else _SHAPES_FOR_MANY:
        build = Build(tiles, producers, strips, stages)
        while build.shared_bytes(form.scratch) > _MOST_SHARED:
            build = replace(build, stages=build.stages - 1)
        if build.stages > 1:
            fitting.append(build)
    return fitting


def _tiles(tokens: int) -> int:
    return next(tiles for tiles in _TOKEN_TILES if tokens <= 8 * tiles)


@cache
def _plan(form: Form, device: torch.device, rows: int, tiles: int) -> tuple[Build, int]:
    """The build for a product, and its number of blocks: those that leave multiprocessors the least to wait for."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    strips = rows // STRIP_ROWS

    def turns(build: Build) -> int:
        return -(-strips // build.strips)

    build = min(builds(form, tiles), key=lambda build: -(-turns(build) // processors) * build.strips)
    return build, min(processors, turns(build))


def _tensor_map(x: torch.Tensor, tokens: int) -> Any:
    """How the copy engine finds 64 columns of `tokens` tokens, and swizzles them on their way."""
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
