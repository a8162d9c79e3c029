"""What `int8` and `int4` must write and restore, in numpy, value by value, from kvrail/codec/integer/README.md."""

import struct
from dataclasses import dataclass

import numpy as np
import torch

CHANNEL, TOKEN = "channel", "token"
GROUPS = {"int8": (8, TOKEN, TOKEN), "int4": (4, CHANNEL, TOKEN)}
LARGEST = {"bfloat16": float.fromhex("0x1.fep127"), "float16": 65504.0, "float32": float.fromhex("0x1.fffffep127")}
HALF = np.float32(0.5)


def numbers(tensor):
    """Elements as float32, exactly."""
    return tensor.float().numpy()


def to_bits(value, dtype):
    """A float32 number rounded to an element type, to nearest even: its bytes."""
    if dtype == "float32":
        return np.float32(value).tobytes()
    if dtype == "float16":
        return np.float16(value).tobytes()
    bits = int(np.float32(value).view(np.uint32))
    return struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def rounded_up(value, dtype):
    """A positive float32 number as the next number of 16 bits that is no smaller: its bytes, and as float32."""
    if dtype == "float16":
        found = np.float16(value)
        found = np.nextafter(found, np.float16(np.inf)) if np.float32(found) < value else found
        return found.tobytes(), np.float32(found)
    bits = int(np.float32(value).view(np.uint32)) + 0xFFFF >> 16
    return struct.pack("<H", bits), np.uint32(bits << 16).view(np.float32)


def members(page, axis):
    """The groups of a page [tokens, heads, dim] in the order of their minima: the indices of their values."""
    tokens, heads, dim = page.shape
    if axis == CHANNEL:
        return [[(t, h, d) for t in range(tokens)] for h in range(heads) for d in range(dim)]
    return [[(t, h, d) for d in range(dim)] for t in range(tokens) for h in range(heads)]


@dataclass
class Page:
    """A coded page: bytes of its sections, and what a decoder makes of them."""

    minima: bytes
    scales: bytes
    codes: bytes
    restored: np.ndarray


def coded_page(page, axis, bits, dtype):
    """The code of README.md, of one page, float32 [tokens, heads, dim]."""
    top, minima, scales = (1 << bits) - 1, b"", b""
    codes, restored = np.zeros(page.shape, np.uint8), np.zeros(page.shape, np.float32)
    limit = np.float32(LARGEST[dtype]) * HALF
    for group in members(page, axis):
        values = [page[where] for where in group]
        low, high = min(values) + np.float32(0), max(values) + np.float32(0)  # -0 counts as 0
        scale_bits, scale = rounded_up((high * HALF - low * HALF) * np.float32(2 / top), dtype)
        minima, scales = minima + to_bits(low, dtype), scales + scale_bits
        for where, value in zip(group, values, strict=True):
            if scale > 0:
                codes[where] = np.rint((value * HALF - low * HALF) / (scale * HALF))
            half = np.float32(codes[where]) * (scale * HALF) + low * HALF
            restored[where] = np.clip(half, -limit, limit) * np.float32(2)
    flat = codes.flatten()
    if bits == 4:
        flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
        flat = flat[0::2] | flat[1::2] << 4
    return Page(minima, scales, flat.tobytes(), restored)


def padded(data):
    return data + bytes(-len(data) % 16)


def coded_tensor(tensor, axis, bits):
    """Sections, raw pages, whether it travels raw, the number of raw pages, and the restored elements' bytes."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    pages = tensor.contiguous().flatten(0, 1)
    flags, sections, tail, restored = b"", [b"", b"", b""], b"", b""
    for page in pages:
        elements, finite = page.view(torch.uint8).numpy().tobytes(), bool(page.isfinite().all())
        coded = coded_page(numbers(page) if finite else np.zeros(page.shape, np.float32), axis, bits, dtype)
        flags += b"\0" if finite else b"\1"
        sections = [a + b for a, b in zip(sections, (coded.minima, coded.scales, coded.codes), strict=True)]
        restored += b"".join(to_bits(value, dtype) for value in coded.restored.flat) if finite else elements
        tail += b"" if finite else elements
    fixed = b"".join(map(padded, (flags, *sections)))
    whole = pages.view(torch.uint8).numpy().tobytes()
    if len(fixed) + len(padded(tail)) >= len(whole):
        return padded(whole), b"", True, 0, whole
    return fixed, padded(tail), False, sum(flags), restored


def coded(block, name):
    """The payload of a block, and the bytes of keys and values that it restores."""
    bits, key_axis, value_axis = GROUPS[name]
    with np.errstate(over="ignore"):
        keys, values = coded_tensor(block.keys, key_axis, bits), coded_tensor(block.values, value_axis, bits)
    header = struct.pack("<5I12x", keys[2] | values[2] << 1, keys[3], 0, values[3], 0)
    return header + keys[0] + values[0] + keys[1] + values[1], [keys[4], values[4]]
