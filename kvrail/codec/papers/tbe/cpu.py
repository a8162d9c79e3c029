"""Weights to TCA-TBE and back on a CPU's cores: the offline compressor of ZipServ's algorithm 1."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from kvrail.codec.base import CodecError
from kvrail.codec.core.cpu import usable_cores
from kvrail.codec.papers.tbe.cpu_kernels import count_bits, count_exponents, fill_blocks, map_blocks, read_blocks
from kvrail.codec.papers.tbe.format import (
    BLOCK,
    FRAGMENTS,
    MOST_BASE,
    MOST_BYTES,
    PLANES,
    STRIPS,
    UNIT,
    WINDOW,
    TbeWeight,
    blocks_of,
)

_MAX_THREADS = 16
_SHARES = 4
"""Pieces of work for each thread, so that no thread waits long for another."""

Counts = npt.NDArray[np.int64]


def compress(weight: torch.Tensor) -> TbeWeight:
    """A weight, bfloat16 [rows, columns] of any shape, as TCA-TBE, in host memory.

    Beside the weight and the result it takes 48 bytes for each 4,096 weights. Raises CodecError for other types, and
    where the values would take 4 GiB or more.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        found = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        raise CodecError(f"TCA-TBE takes weights of bfloat16 [rows, columns], not {found}")
    rows, columns = weight.shape
    bits = weight.detach().contiguous().cpu().view(torch.int16).numpy().view(np.uint16)
    down, across = blocks_of(rows, columns)
    blocks = down * across
    base = _base_exponent(bits)
    bitmaps = np.empty((blocks, STRIPS, PLANES, FRAGMENTS), np.uint64)
    counts = np.zeros((blocks, STRIPS), np.int64)
    _in_shares(blocks, lambda begin, end: map_blocks(bits, base, begin, end, bitmaps, counts))
    offsets, starts, (coded, other) = _laid_out(counts)
    if coded >= MOST_BYTES:
        raise CodecError(f"the weight's {coded} values with a code take 4 GiB or more; split it by rows")
    sign_mantissas, full_values = np.zeros(coded, np.uint8), np.zeros(other, np.uint16)
    given = (starts, sign_mantissas, full_values)
    _in_shares(blocks, lambda begin, end: fill_blocks(bits, base, bitmaps, begin, end, *given))
    parts = (np.array([base], np.int32), bitmaps.view(np.int64), sign_mantissas, full_values.view(np.int16), offsets)
    return TbeWeight(rows, columns, *map(torch.from_numpy, parts))


def decompress(weight: TbeWeight) -> torch.Tensor:
    """The weight, bfloat16 [rows, columns], in host memory, bit for bit as it was compressed.

    Raises CodecError, which says what is wrong, where the parts do not fit each other.
    """
    starts = check(weight)
    bitmaps = weight.bitmaps.cpu().numpy().view(np.uint64)
    sign_mantissas, full_values = weight.sign_mantissas.cpu().numpy(), weight.full_values.cpu().numpy().view(np.uint16)
    bits = np.empty((weight.rows, weight.columns), np.uint16)
    base, given = int(weight.base), (starts, sign_mantissas, full_values, bits)
    _in_shares(len(starts), lambda begin, end: read_blocks(bitmaps, base, begin, end, *given))
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def check(weight: TbeWeight) -> Counts:
    """Where the values of each BlockTile begin in either buffer, int64 [BlockTiles, 2].

    Raises CodecError where offsets, bitmaps and buffers do not fit each other, so that no reader of a checked
    weight reads outside its parts.
    """
    _check_shapes(weight)
    bitmaps = weight.bitmaps.cpu().numpy().view(np.uint64)
    counts = np.zeros((len(weight.offsets), STRIPS), np.int64)
    _in_shares(len(counts), lambda begin, end: count_bits(bitmaps, begin, end, counts))
    wanted, starts, lengths = _laid_out(counts)
    found = weight.offsets.cpu().numpy()
    wrong = np.flatnonzero((found != wanted).any(1))
    if len(wrong):
        block = int(wrong[0])
        raise CodecError(
            f"offsets of BlockTile {block} are {found[block].tolist()}, but the bitmaps say {wanted[block].tolist()}"
        )
    for name, length in zip(("sign_mantissas", "full_values"), lengths, strict=True):
        if (found_length := weight.parts[name].numel()) != length:
            raise CodecError(f"{name} has {found_length} values, but the bitmaps say {length}")
    return starts


def _check_shapes(weight: TbeWeight) -> None:
    if weight.rows < 0 or weight.columns < 0:
        raise CodecError(f"a weight cannot have the shape {[weight.rows, weight.columns]}")
    down, across = blocks_of(weight.rows, weight.columns)
    blocks = down * across
    wanted: dict[str, tuple[torch.dtype, list[int] | None]] = {
        "base": (torch.int32, [1]),
        "bitmaps": (torch.int64, [blocks, STRIPS, PLANES, FRAGMENTS]),
        "sign_mantissas": (torch.uint8, None),
        "full_values": (torch.int16, None),
        "offsets": (torch.int32, [blocks, 4]),
    }
    for name, part in weight.parts.items():
        dtype, shape = wanted[name]
        fits = list(part.shape) == shape if shape is not None else part.dim() == 1
        if part.dtype != dtype or not fits or not part.is_contiguous():
            found = f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
            expected = f"{str(dtype).removeprefix('torch.')} {shape or '[n]'}, contiguous"
            raise CodecError(f"{name} is {found}; a weight of {[weight.rows, weight.columns]} has {expected}")
    if not 0 <= int(weight.base) <= MOST_BASE:
        raise CodecError(f"base is {int(weight.base)}; it can be 0 to {MOST_BASE}")


def _base_exponent(bits: npt.NDArray[np.uint16]) -> int:
    """The exponent before the seven consecutive ones, none of them 0, that most weights have; the lowest of equals."""
    flat = bits.reshape(-1)
    tables: list[Counts] = []

    def count(begin: int, end: int) -> None:
        own = np.zeros(256, np.int64)
        count_exponents(flat[begin:end], own)
        tables.append(own)

    _in_shares(flat.size, count)
    histogram = np.sum(tables, axis=0) if tables else np.zeros(256, np.int64)
    sums = np.concatenate([[0], np.cumsum(histogram)])
    begins = np.arange(1, MOST_BASE + 2)
    return int(np.argmax(sums[begins + WINDOW] - sums[begins]))


def _laid_out(counts: Counts) -> tuple[npt.NDArray[np.int32], Counts, tuple[int, int]]:
    """From the strips' coded weights: offsets, where each block's values begin, and the lengths of both buffers."""
    within = counts.cumsum(1)
    values = np.stack([within[:, -1], BLOCK * BLOCK - within[:, -1]], 1)
    per_unit = np.array([UNIT, UNIT // 2])
    units = -(-values // per_unit)
    begins = units.cumsum(0) - units
    inner = np.stack([within[:, 0] | within[:, 1] << 16, within[:, 2] | within[:, 3] << 16], 1)
    lengths = (units.sum(0) + 1) * per_unit
    offsets = np.concatenate([begins, inner], 1).astype(np.int32)
    return np.ascontiguousarray(offsets), np.ascontiguousarray(begins * per_unit), (int(lengths[0]), int(lengths[1]))


def _in_shares(count: int, work: Callable[[int, int], None]) -> None:
    """`work(begin, end)` for all of `count`, on the cores that this process may use."""
    threads = usable_cores(_MAX_THREADS)
    step = max(1, -(-count // (threads * _SHARES)))
    begins = range(0, count, step)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, begin, min(count, begin + step)) for begin in begins]:
            done.result()
