"""The digest LANES: the kernel, in Triton's interpreter or compiled on a GPU, and numpy against plain integers."""

import random
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrail.codec.core.digest import DigestKind, digest_of, finished, lanes_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
MODULUS = 1 << 64
SIZES = [0, 1, 7, 8, 9, 15, 16, 63, 64, 4095, 16384, 16385, 3 * 16384 + 13]


def mix(x):
    x = x * 0xFF51AFD7ED558CCD % MODULUS
    x ^= x >> 32
    x = x * 0xC4CEB9FE1A85EC53 % MODULUS
    return x ^ x >> 32


def by_definition(payload):
    words = [word for (word,) in struct.iter_unpack("<Q", payload + bytes(-len(payload) % 8))]
    total = sum(mix(word ^ (i + 1) * 0x9E3779B97F4A7C15 % MODULUS) for i, word in enumerate(words))
    return mix((len(payload) + total) % MODULUS)


def by_kernel(payload, offset=0):
    """offset: bytes by which the payload is off an aligned address."""
    pytest.importorskip("triton")
    from kvrail.codec.core.gpu_digest import sum_of_words

    around = torch.full((len(payload) + offset + 64,), 0xA5, dtype=torch.uint8)
    around[offset : offset + len(payload)] = torch.tensor(list(payload), dtype=torch.uint8)
    found = sum_of_words(around.to(DEVICE)[offset : offset + len(payload)])
    return finished(found, len(payload))


def noise(size, seed=0):
    return random.Random(seed).randbytes(size)


@given(st.binary(max_size=200))
def test_numpy_is_the_definition(payload):
    assert lanes_of(memoryview(payload)) == by_definition(payload)


@pytest.mark.parametrize("size", [*SIZES, 8 * (1 << 16) - 1, 8 * (1 << 16) + 3])
def test_numpy_is_the_definition_at_the_edges_of_pieces(size):
    assert lanes_of(memoryview(noise(size))) == by_definition(noise(size))


@pytest.mark.parametrize("size", SIZES)
def test_kernel_is_the_definition_whatever_was_summed_before(size):
    for seed in range(3):
        payload = noise(size, seed)
        assert by_kernel(payload) == by_definition(payload)


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_kernel_takes_any_address(offset):
    assert by_kernel(noise(1000), offset) == by_definition(noise(1000))


def test_known_values():
    assert lanes_of(memoryview(b"")) == 0
    assert lanes_of(memoryview(b"kvrail")) == 0xBE128245611103A2


@pytest.mark.parametrize("digest", [lambda payload: lanes_of(memoryview(payload)), by_kernel], ids=["numpy", "kernel"])
def test_damage_changes_it(digest):
    payload = noise(77)
    seen = {digest(payload)}
    for index in range(len(payload)):
        for bit in range(8):
            torn = bytearray(payload)
            torn[index] ^= 1 << bit
            seen.add(digest(bytes(torn)))
    seen |= {digest(payload[:end]) for end in range(len(payload))} | {digest(payload + b"\0")}
    assert len(seen) == 1 + 77 * 8 + 78


def test_length_tells_zeros_from_none():
    digests = {lanes_of(memoryview(bytes(size))) for size in range(100)}
    assert len(digests) == 100


@pytest.mark.parametrize("bit", range(64))
def test_swapped_words_that_differ_in_one_bit_change_it(bit):
    """The top bit is what a plain product would not spread: it must not cancel, near or far apart."""
    for seed in range(20):
        words = list(struct.unpack("<64Q", noise(512, seed)))
        words[33] = words[2] ^ 1 << bit
        swapped = list(words)
        swapped[2], swapped[33] = words[33], words[2]
        first, second = (lanes_of(memoryview(struct.pack("<64Q", *each))) for each in (words, swapped))
        assert first != second


def test_swapped_pages_change_it():
    pages = [noise(4096, seed) for seed in range(8)]
    seen = set()
    for first in range(8):
        for second in range(first, 8):
            order = list(pages)
            order[first], order[second] = order[second], order[first]
            seen.add(lanes_of(memoryview(b"".join(order))))
    assert len(seen) == 1 + 28


def test_bits_of_the_digest_turn_over_by_halves():
    """A flipped bit of the payload changes each bit of the digest about half of the time."""
    turned, count = [0] * 64, 2000
    for seed in range(count):
        payload = bytearray(noise(64, seed))
        before = lanes_of(memoryview(payload))
        payload[seed % 64] ^= 1 << seed // 64 % 8
        change = before ^ lanes_of(memoryview(payload))
        for bit in range(64):
            turned[bit] += change >> bit & 1
    assert all(abs(each - count / 2) < 6 * (count / 4) ** 0.5 for each in turned)  # six standard deviations


def test_kind_follows_where_the_payload_lies():
    assert digest_of(memoryview(b"abc")).kind is DigestKind.XXH3
    assert digest_of(torch.zeros(3, dtype=torch.uint8)).kind is DigestKind.XXH3
    assert digest_of(torch.zeros(3, dtype=torch.uint8, device=DEVICE), DigestKind.LANES).value == lanes_of(
        memoryview(bytes(3))
    )
