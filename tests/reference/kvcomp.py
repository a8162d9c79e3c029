"""The code in plain numpy and Python, value by value: what `torch_ops.py` and `cpu.py` must equal, bit for bit."""

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrail.codec.base import Block
from kvrail.codec.core.sections import StreamPart, joined
from kvrail.codec.papers.kvcomp.codebook import MAX_BITS, lengths_of, packed_lengths
from kvrail.codec.papers.kvcomp.format import SLACK, TINY, KVCompCode
from kvrail.codec.papers.kvcomp.payload import Layout, parse, plans_of, tables_of
from kvrail.codec.papers.kvcomp.plan import TensorPlan
from kvrail.codec.papers.kvcomp.torch_ops import half_tiny

Floats = npt.NDArray[np.float32]
_HALF = np.float32(0.5)


def encode(block: Block, code: KVCompCode) -> bytes:
    """The payload of a block on a CPU."""
    keys, values = (
        _encoded(tensor, plan) for tensor, plan in zip(block.tensors(), plans_of(block.spec, code), strict=True)
    )
    return b"".join((Layout((keys[0], values[0])).header(), keys[1], values[1], keys[2], values[2]))


def decode(payload: bytes, block: Block, code: KVCompCode) -> Block:
    """What a payload restores; block: one of its spec. Raises CodecError where parts other than streams are wrong."""
    source = np.frombuffer(payload, dtype=np.uint8)
    layout, found = parse(source, block.spec, code), []
    for part, start, stream in zip(layout.parts, layout.offsets, layout.streams, strict=True):
        plan, fixed = part.plan, source[start : start + part.fixed_bytes]
        if part.raw:
            found.append(_tensor(fixed[: plan.raw_bytes].tobytes(), plan.dtype).view(plan.shape))
            continue
        minima = (
            _tensor(plan.sections["minima"].of(fixed).tobytes(), plan.dtype).float().numpy().reshape(plan.unit_shape)
        )
        bits = plan.sections["scales"].of(fixed).view("<u2").astype(np.uint32) << 16
        tables, words = tables_of(fixed, plan), source[stream : stream + 4 * part.words]
        symbols = _read(words.tobytes(), plan.sections["lengths"].of(fixed).view("<u2"), tables, plan)
        tensor = _restored(minima, bits.view(np.float32).reshape(plan.unit_shape), symbols, plan)
        positions, elements = part.escapes_of(source[stream:])
        tensor.view(-1)[torch.from_numpy(positions.astype(np.int64))] = _tensor(elements.tobytes(), plan.dtype)
        found.append(tensor)
    return Block(*found)


def _encoded(tensor: torch.Tensor, plan: TensorPlan) -> tuple[StreamPart, bytes, bytes]:
    """Part, fixed sections, and what follows all sections."""
    elements = tensor.contiguous().view(torch.uint8).numpy().reshape(plan.values, -1)
    raw = StreamPart(plan, True), joined((elements.tobytes(),)), b""
    if plan.uncodable:
        return raw
    numbers = tensor.float().numpy()
    symbols, minima = np.zeros(plan.shape, np.uint8), np.zeros(plan.unit_shape, np.float32)
    scales = np.zeros(plan.unit_shape, np.float32)
    for place, unit in _units(plan):
        minima[place], scales[place], symbols[unit] = _unit(numbers[unit], plan)
    with np.errstate(invalid="ignore", over="ignore"):
        found = _restored(minima, scales, symbols, plan).float().numpy()
        share = np.float32(2.0 ** -(plan.format.mantissa_bits + 1))
        allowed = np.maximum(np.abs(found) * share, np.float32(half_tiny(plan))) + scales * _HALF
        escaped = ~(np.abs(found - numbers) <= allowed)
    tables = [lengths_of(np.bincount(layer.flat, minlength=plan.code.symbols).tolist()) for layer in symbols]
    lengths, ends, stream = _written(symbols, tables)
    positions = np.flatnonzero(escaped).astype("<u4")
    part = StreamPart(plan, False, len(stream) // 4, positions.size)
    if plan.travels_raw(part.words, part.escapes):
        return raw
    low = torch.from_numpy(minima).to(plan.dtype).view(torch.uint8).numpy().tobytes()
    fixed = b"".join(map(packed_lengths, tables)), low, (scales.view(np.uint32) >> 16).astype("<u2").tobytes()
    return (
        part,
        joined((*fixed, struct.pack(f"<{len(lengths)}H", *lengths), struct.pack(f"<{len(ends)}I", *ends))),
        joined((stream, positions.tobytes(), elements[positions].tobytes())),
    )


def _units(plan: TensorPlan) -> Iterator[tuple[tuple[int, ...], tuple[int | slice, ...]]]:
    """Yield each unit's index in minima and scales, and that of its values in the tensor."""
    for place in np.ndindex(*plan.unit_shape):
        yield place, tuple(slice(None) if axis in plan.code.granularity.value else at for axis, at in enumerate(place))


def _unit(values: Floats, plan: TensorPlan) -> tuple[np.float32, np.float32, npt.NDArray[np.uint8]]:
    """Minimum, scale and symbols of a unit."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.float32(0), np.float32(0), np.zeros(values.shape, np.uint8)
    low, high = finite.min() + np.float32(0), finite.max() + np.float32(0)
    scale = (high * _HALF - low * _HALF) * np.float32(2 * plan.code.scale * (1 - SLACK))
    if scale < np.float32(TINY):
        return low, np.float32(0), np.zeros(values.shape, np.uint8)
    scale = np.uint32(scale.view(np.uint32) & 0xFFFF0000).view(np.float32)
    with np.errstate(invalid="ignore"):
        steps = np.rint((values * _HALF - low * _HALF) / (scale * _HALF))
    return low, scale, np.where(np.isfinite(values), np.clip(steps, 0, plan.code.top), 0).astype(np.uint8)


def _restored(minima: Floats, scales: Floats, symbols: npt.NDArray[np.uint8], plan: TensorPlan) -> torch.Tensor:
    """Elements; torch rounds float32 to the element type, to nearest even."""
    limit = np.float32(plan.format.largest) * _HALF
    with np.errstate(over="ignore"):
        halves = symbols.astype(np.float32) * (scales * _HALF) + minima * _HALF
    return torch.from_numpy(np.clip(halves, -limit, limit) * np.float32(2)).to(plan.dtype)


def _texts(lengths: Sequence[int]) -> dict[int, str]:
    """Canonical codes by symbol, as strings of 0 and 1, the first bit first."""
    texts, code, bits = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - bits
        bits = length
        texts[symbol] = f"{code:0{bits}b}"
        code += 1
    return texts


def _written(symbols: npt.NDArray[np.uint8], tables: Sequence[Sequence[int]]) -> tuple[list[int], list[int], bytes]:
    """Bits of each vector, ends of each block, the stream."""
    lengths: list[int] = []
    ends: list[int] = []
    stream = b""
    for layer, table in zip(symbols, tables, strict=True):
        texts = _texts(table)
        for page in layer:
            for head in range(page.shape[1]):
                vectors = ["".join(texts[symbol] for symbol in vector) for vector in page[:, head].tolist()]
                text = "".join(vectors)
                size = -(-len(text) // 32) * 4
                stream += int(text[::-1], 2).to_bytes(size, "little")
                lengths += map(len, vectors)
                ends.append(len(stream) // 4)
    return lengths, ends, stream


def _read(
    stream: bytes, lengths: npt.NDArray[np.uint16], tables: Sequence[Sequence[int]], plan: TensorPlan
) -> npt.NDArray[np.uint8]:
    """The inverse of `_written`."""
    layers, pages, page_size, heads, dim = plan.shape
    symbols, number, at = np.zeros(plan.shape, np.uint8), 0, 0
    for layer in range(layers):
        by_text = {text: symbol for symbol, text in _texts(tables[layer]).items()}
        for page, head in np.ndindex(pages, heads):
            vectors = lengths[number : number + page_size].tolist()
            size = -(-sum(vectors) // 32) * 4
            text = f"{int.from_bytes(stream[at : at + size], 'little'):0{8 * size}b}"[::-1]
            at, number, bit = at + size, number + page_size, 0
            for row, column in np.ndindex(page_size, dim):
                taken = next(n for n in range(1, MAX_BITS + 1) if text[bit : bit + n] in by_text)
                symbols[layer, page, row, head, column] = by_text[text[bit : bit + taken]]
                bit += taken
    return symbols


def _tensor(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
