"""Damaged containers of the tensor codec huffman: refused, or at worst wrong bits, never a write outside."""

import struct

import numpy as np
import pytest
import torch

from kvrail import codec
from kvrail.codec.base import CodecError
from kvrail.codec.huffman import cpu, payload
from kvrail.codec.huffman.codec import HuffmanCodec
from kvrail.codec.huffman.payload import digest, parse

HUFFMAN = HuffmanCodec()
GUARD = 4096


def weights(count=30_000, seed=0):
    return 0.02 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def sealed(container):
    """The same bytes with checksums that fit, as one who forges them would write."""
    data = np.frombuffer(bytes(container), np.uint8).copy()
    planes, ndim, chunks = data[9], data[8], struct.unpack_from("<Q", data, 24)[0]
    start = payload.HEADER_BYTES + 8 * int(ndim)
    head = start + chunks * (8 + 4 * int(planes))
    rows = data[start + 8 * chunks : head].view("<u4").reshape(chunks, planes)
    at = head
    for chunk, size in enumerate((rows & ((1 << 28) - 1)).sum(axis=1).tolist()):
        struct.pack_into("<Q", data, start + 8 * chunk, digest(data[at : at + size]))
        at += size
    data[32:40] = 0
    struct.pack_into("<Q", data, 32, digest(data[:head]))
    return data


def guarded_decode(data):
    """Decode between guards; whether it was taken. Fails where a guard was touched."""
    layout = parse(data)
    memory = np.full(layout.raw_bytes + 2 * GUARD, 0xA5, np.uint8)
    out = memory[GUARD : GUARD + layout.raw_bytes]
    try:
        cpu.decode(layout, data, None, out, threads=1)
        taken = True
    except CodecError:
        taken = False
    assert (memory[:GUARD] == 0xA5).all() and (memory[GUARD + layout.raw_bytes :] == 0xA5).all()
    return taken


CONTAINERS = {
    "bfloat16": lambda: HUFFMAN.encode(weights().bfloat16()),
    "float8": lambda: HUFFMAN.encode((weights() * 5000).to(torch.float8_e4m3fn)),
    "float16": lambda: HUFFMAN.encode(weights().half()),
    "widened": lambda: HUFFMAN.encode(weights().bfloat16().float()),
    "sparse": lambda: HUFFMAN.encode((weights() > 0.035).to(torch.uint8) * 3),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_flipped_bit_is_seen(kind):
    container = bytearray(CONTAINERS[kind]())
    rng = np.random.default_rng(0)
    head = parse(np.frombuffer(bytes(container), np.uint8)).head_bytes
    for bit in [*range(8 * min(head, 80)), *rng.integers(0, 8 * len(container), 150).tolist()]:
        container[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CodecError):
            codec.decode(memoryview(container))
        container[bit // 8] ^= 1 << bit % 8
    codec.decode(memoryview(container))


def test_a_byte_of_a_chunk_that_is_only_copied_is_refused_by_number():
    raw = torch.randint(0, 256, (4 * (1 << 17) + 300,), dtype=torch.uint8)
    container = bytearray(codec.encode(raw))
    head = parse(np.frombuffer(container, np.uint8)).head_bytes
    assert len(container) == head + raw.numel()
    for place in (0, (1 << 17) - 1, 1 << 17, 3 * (1 << 17) + 1024, raw.numel() - 1):
        container[head + place] ^= 16
        for threads in (1, 2):
            with pytest.raises(CodecError, match=f"chunk {place >> 17} of 5 does not match its checksum"):
                HUFFMAN.decode(memoryview(container), threads=threads)
        container[head + place] ^= 16
    assert torch.equal(HUFFMAN.decode(memoryview(container)), raw)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_what_is_cut_off_or_too_long_is_refused(kind):
    container = CONTAINERS[kind]()
    for size in [*range(0, 120, 7), len(container) // 2, len(container) - 1]:
        with pytest.raises(CodecError):
            codec.decode(memoryview(container[:size]))
    with pytest.raises(CodecError, match="cut off or too long"):
        codec.decode(memoryview(bytes(container) + b"\0"))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_forged_chunks_touch_nothing_outside(kind):
    container = np.frombuffer(CONTAINERS[kind](), np.uint8)
    head = parse(container).head_bytes
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        forged = container.copy()
        first = head if rng.random() < 0.5 else rng.integers(head, container.size)
        places = rng.integers(first, min(container.size, first + rng.integers(1, 200)), rng.integers(1, 6))
        forged[places] = rng.integers(0, 256, places.size, dtype=np.uint8)
        refused += not guarded_decode(sealed(forged))
    assert refused > 5


@pytest.mark.parametrize("kind", CONTAINERS)
def test_forged_modes_and_sizes_touch_nothing_outside(kind):
    container = np.frombuffer(CONTAINERS[kind](), np.uint8)
    layout = parse(container)
    start = layout.head_bytes - layout.rows.nbytes
    rng = np.random.default_rng(2)
    for _ in range(200):
        forged = container.copy()
        rows = forged[start : layout.head_bytes].view("<u4")
        plane = rng.integers(rows.size)
        rows[plane] = rows[plane] & ((1 << 28) - 1) | rng.integers(0, 6) << 28
        if rows.size > 1:
            moved = min(rng.integers(0, 3000), int(rows[1] & ((1 << 28) - 1)))
            rows[0] += moved
            rows[1] -= moved
        guarded_decode(sealed(forged))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, ord("X"), "this is no huffman container|begin with"),
        (4, 9, "has version 9; this code reads 1"),
        (5, 99, "element type 99"),
        (7, 40, r"chunks of 2\^40 words"),
        (8, 200, "200 dimensions"),
        (26, 255, "the index of 16711681 chunks ends at byte"),
        (40, 1, "does not match|do not match their checksum"),
    ],
)
def test_the_message_says_what_is_wrong(place, value, words):
    container = bytearray(CONTAINERS["bfloat16"]())
    container[place] = value
    with pytest.raises(CodecError, match=words):
        codec.decode(memoryview(container))


def test_a_shape_that_claims_too_much_takes_no_memory():
    container = bytearray(CONTAINERS["bfloat16"]())
    struct.pack_into("<Q", container, 40, 1 << 60)
    with pytest.raises(CodecError, match=f"a tensor of {2 << 60} bytes does not have 1 chunks"):
        parse(sealed(container))


def test_a_shape_that_no_tensor_has_is_refused():
    container = bytearray(HUFFMAN.encode(torch.empty(0, 5)))
    for size in (1 << 62, (1 << 64) - 1):
        struct.pack_into("<Q", container, 48, size)
        with pytest.raises(CodecError, match=rf"no tensor has shape \[0, {size}\]"):
            codec.decode(memoryview(sealed(container)))


def test_memory_that_there_is_not_is_an_error_by_name(monkeypatch):
    def none(*arguments):
        raise MemoryError

    container = HUFFMAN.encode(weights())
    monkeypatch.setattr(cpu.np, "empty", none)
    with pytest.raises(CodecError, match="takes 120,000 bytes of memory, more than this machine gives"):
        HUFFMAN.decode(container)


def test_the_wrong_base_is_named():
    before, after = weights().bfloat16(), (weights() * 1.001).bfloat16()
    delta = codec.encode(after, base=before)
    with pytest.raises(CodecError, match="the container is a delta; decode it with the base"):
        codec.decode(delta)
    with pytest.raises(CodecError, match="is not the one that this delta was encoded with"):
        codec.decode(delta, base=after)
    with pytest.raises(CodecError, match="is no delta, but a base was given"):
        codec.decode(codec.encode(after), base=before)
