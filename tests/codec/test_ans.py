"""rANS: the coder on a CPU equals the reference bit for bit, and damage is refused; models add up."""

from pathlib import Path

import numpy as np
import pytest
from ans_cases import SPECIAL, codes, rare, with_end, with_words_before, wrong_ends
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.codec.base import CodecError
from kvrail.codec.core import cpu as core_cpu
from kvrail.codec.splitzip.entropy import cpu
from kvrail.codec.splitzip.entropy.format import (
    BLOCK_BYTES,
    LANES,
    RECIPROCAL_BITS,
    SYMBOLS,
    TOTAL,
    frequencies_of,
    num_blocks,
)
from kvrail.codec.splitzip.entropy.payload import head_bytes
from tests.reference import entropy as reference

GOLDEN = Path(__file__).parent / "golden" / "ans_piece.bin"


def decompressed(coded, size):
    piece = np.full(size, 0xA5, dtype=np.uint8)
    cpu.decompress(coded, piece)
    return piece


def entropy_bytes(piece):
    """What an ideal coder of single bytes would need, its table not counted."""
    share = np.bincount(piece, minlength=SYMBOLS) / piece.size
    share = share[share > 0]
    return -(share * np.log2(share)).sum() * piece.size / 8


def equals_the_reference(piece):
    coded = cpu.compress(piece)
    assert coded.tobytes() == reference.encode(piece)
    assert decompressed(coded, piece.size).tobytes() == piece.tobytes() == reference.decode(coded, piece.size)


@pytest.mark.parametrize("name", SPECIAL)
def test_equals_the_reference(name):
    equals_the_reference(SPECIAL[name])


@settings(max_examples=60)
@given(
    size=st.integers(1, 3000), symbols=st.integers(1, 256), skew=st.sampled_from([0.1, 1.0, 8.0]), seed=st.integers(0)
)
def test_equals_the_reference_on_any_piece(size, symbols, skew, seed):
    rng = np.random.default_rng(seed % 2**32)
    shares = rng.dirichlet(np.full(symbols, 1 / skew))
    equals_the_reference(rng.permutation(256)[rng.choice(symbols, size, p=shares)].astype(np.uint8))


@pytest.mark.parametrize("blocks", [2, 5, 9])
def test_several_threads_give_the_same_bytes(blocks, monkeypatch):
    pieces = [codes(blocks * BLOCK_BYTES + 77, seed) for seed in range(3)]
    coded = [cpu.compress(piece) for piece in pieces]
    monkeypatch.setattr(core_cpu, "MAX_THREADS", 4)
    monkeypatch.setattr(core_cpu, "BYTES_PER_THREAD", 1 << 10)
    assert [each.tobytes() for each in map(cpu.compress, pieces)] == [each.tobytes() for each in coded]
    outs = [np.zeros_like(piece) for piece in pieces]
    cpu.restore_pieces(coded, outs)
    assert all(np.array_equal(out, piece) for out, piece in zip(outs, pieces, strict=True))


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.2, 4.0])
def test_size_is_near_the_entropy(spread):
    piece = codes(1 << 20, 3, spread)
    head = head_bytes(piece.size) + 4 * LANES * num_blocks(piece.size)
    assert cpu.compress(piece).size < 1.006 * entropy_bytes(piece) + head


def test_symbols_that_occur_once_in_a_million_come_back():
    piece = rare(1 << 20)
    coded = cpu.compress(piece)
    assert coded.size < 0.12 * piece.size
    assert np.array_equal(decompressed(coded, piece.size), piece)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2**40), min_size=SYMBOLS, max_size=SYMBOLS).filter(any), st.integers(0, 40))
def test_frequencies_add_up_and_none_that_occurs_is_zero(counts, shift):
    counts = np.array(counts, dtype=np.int64)
    counts[::3] >>= shift
    counts[1] += 1
    frequencies = frequencies_of(counts)
    assert frequencies.sum() == TOTAL
    assert ((frequencies > 0) == (counts > 0)).all()


def test_products_with_reciprocals_are_quotients():
    for frequency in range(1, TOTAL + 1):
        reciprocal = (1 << RECIPROCAL_BITS) // frequency + 1
        for quotient in (1, 2, (1 << 20) - 1, 1 << 20):
            for state in (quotient * frequency - 1, quotient * frequency):
                if state < frequency << 20:
                    assert state * reciprocal < 1 << 64
                    assert state * reciprocal >> RECIPROCAL_BITS == state // frequency


def refused(coded, size):
    """Both coders refuse, with the same words where it is the head that is wrong."""
    with pytest.raises(CodecError, match="coded piece"):
        decompressed(np.frombuffer(coded, dtype=np.uint8), size)
    with pytest.raises(CodecError, match="coded piece"):
        reference.decode(np.frombuffer(coded, dtype=np.uint8), size)


def test_any_cut_and_any_other_size_is_refused():
    piece = codes(3000)
    coded = cpu.compress(piece).tobytes()
    for end in [*range(0, head_bytes(piece.size) + 8), *range(0, len(coded), 61), len(coded) - 1]:
        refused(coded[:end], piece.size)
    refused(coded + bytes(8), piece.size)
    for size in (1, piece.size - 1, piece.size + 1, BLOCK_BYTES + 1, 3 * BLOCK_BYTES):
        refused(coded, size)


def test_any_byte_changed_is_refused():
    piece = codes(700)
    coded = cpu.compress(piece)
    for at in range(coded.size):
        for change in (1, 0x80, 0xFF):
            wrong = coded.copy()
            wrong[at] ^= change
            with pytest.raises(CodecError, match="coded piece"):
                decompressed(wrong, piece.size)
    wrong = coded.copy()
    wrong[: 2 * SYMBOLS] = 0
    refused(wrong.tobytes(), piece.size)


def test_ends_that_cross_are_refused():
    piece = codes(3 * BLOCK_BYTES)
    coded = cpu.compress(piece)
    for number, end in wrong_ends(coded, piece.size):
        refused(with_end(coded, piece.size, number, end).tobytes(), piece.size)


def test_words_that_no_lane_asks_for_are_refused():
    piece = codes(700)
    refused(with_words_before(cpu.compress(piece), piece.size).tobytes(), piece.size)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_noise_behind_a_good_head_is_refused(seed, size):
    coded = cpu.compress(codes(size)).copy()
    noise = np.random.default_rng(seed).integers(0, 256, coded.size - head_bytes(size), dtype=np.uint8)
    coded[head_bytes(size) :] = noise
    refused(coded.tobytes(), size)


def test_a_piece_may_begin_at_any_address():
    piece = codes(1000)
    coded = cpu.compress(piece)
    for shift in range(1, 8):
        memory = np.zeros(coded.size + 8, dtype=np.uint8)
        memory[shift : shift + coded.size] = coded
        assert np.array_equal(decompressed(memory[shift : shift + coded.size], piece.size), piece)


def golden_piece():
    """Bytes by a formula: small ones more often, over two blocks."""
    index = np.arange(BLOCK_BYTES + 1000, dtype=np.int64) * 2654435761
    mixed = index >> 7 ^ index >> 15
    return ((mixed & 63) * (mixed >> 6 & 63) >> 7 | (mixed >> 3 & 3) << 6).astype(np.uint8)


def test_golden_piece():
    coded = GOLDEN.read_bytes()
    assert cpu.compress(golden_piece()).tobytes() == coded
    assert reference.decode(np.frombuffer(coded, dtype=np.uint8), golden_piece().size) == golden_piece().tobytes()
    assert len(coded) % 8 == 0
