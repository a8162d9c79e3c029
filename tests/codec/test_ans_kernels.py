"""rANS's Triton kernels in Triton's interpreter against the slow reference; tests/gpu runs them compiled."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from ans_cases import SPECIAL, codes, rare, with_end, with_words_before, wrong_ends
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of
from test_entropy import in_pool, joined, kv_block
from test_entropy import pieces_of as pieces_in

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_entropy.py covers these kernels on a GPU", allow_module_level=True)

from kvrail.codec.base import CodecError
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.entropy import cpu, gpu, gpu_launch
from kvrail.codec.splitzip.entropy.codec import AnsCodec
from kvrail.codec.splitzip.entropy.format import BLOCK_BYTES, num_blocks
from kvrail.codec.splitzip.entropy.payload import BODY, LENGTHS, TABLE_BYTES, coded_bytes, head_bytes, pieces_of
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import parse_header
from kvrail.codec.splitzip.tiles.plan import plans_of
from tests.reference import entropy as reference

CODE = WindowCode(4, True)
POISON = 0xA5
PIECES = [
    [codes(256)],
    [np.full(4, 9, dtype=np.uint8), SPECIAL["all symbols once"], np.full(1000, 7, dtype=np.uint8)],
    [codes(128), rare(1024, 100), codes(132)],
    pytest.param([codes(BLOCK_BYTES + 512), codes(100), codes(2048)], marks=pytest.mark.heavy),
    pytest.param([rare(2 * BLOCK_BYTES)], marks=pytest.mark.heavy),
]
CODED = (1, 2, 64, 2, 32, 32)
"""Pages of which codes are enough to be coded."""
NOISE = (1, 1, 64, 1, 16, 16)
"""Pages of whole tiles. Where their bits are random nearly all values escape, which takes the interpreter long."""
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim; of pages of random bits; element type
    (CODED, NOISE, "bfloat16"),
    ((2, 1, 7, 3, 5, 9), (2, 1, 7, 3, 5, 9), "bfloat16"),
    ((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1), "float8_e4m3fn"),
    pytest.param(CODED, CODED, "bfloat16", marks=pytest.mark.heavy),
    pytest.param((1, 1, 64, 2, 40, 32), (1, 1, 64, 2, 40, 32), "float16", marks=pytest.mark.heavy),
    pytest.param((1, 2, 63, 1, 33, 31), (1, 2, 63, 1, 33, 31), "float8_e5m2", marks=pytest.mark.heavy),
]


def coded(pieces):
    """Memory with the pieces one after the other, their places, and each as the kernels code it."""
    inner = torch.from_numpy(np.concatenate(pieces))
    ends = np.cumsum([0, *(piece.size for piece in pieces)]).tolist()
    places = [slice(*both) for both in pairwise(ends)]
    found = gpu_launch.launch_code(inner, places)
    words = np.diff(found.ends.numpy()[np.cumsum([num_blocks(piece.size) for piece in pieces]) - 1], prepend=0)
    sizes = [coded_bytes(piece.size, int(count)) for piece, count in zip(pieces, words, strict=True)]
    offsets = (8 + np.cumsum([0, *sizes])).tolist()
    payload = torch.full((offsets[-1] + 8,), POISON, dtype=torch.uint8)
    gpu_launch.launch_place(found, offsets[:-1], payload)
    assert (payload[:8] == POISON).all() and (payload[-8:] == POISON).all()
    return inner, places, payload, [slice(*both) for both in pairwise(offsets)]


def decoded(payload, sources, places, size):
    """What the kernels make of a payload, and whether they call it wrong."""
    out, wrong = torch.full((size + 8,), POISON, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    gpu_launch.launch_decode_pieces(payload, sources, out, places, wrong)
    assert (out[size:] == POISON).all()
    return out[:size], bool(wrong.item())


@pytest.mark.parametrize("pieces", PIECES, ids=lambda pieces: "-".join(str(piece.size) for piece in pieces))
def test_pieces_equal_the_reference_and_come_back(pieces):
    inner, places, payload, sources = coded(pieces)
    for piece, source in zip(pieces, sources, strict=True):
        assert payload[source].numpy().tobytes() == reference.encode(piece)
    out, wrong = decoded(payload, sources, places, inner.numel())
    assert torch.equal(out, inner) and not wrong


def test_a_piece_that_stays_away_leaves_the_payload_alone():
    pieces = [codes(256), codes(128)]
    found = gpu_launch.launch_code(torch.from_numpy(np.concatenate(pieces)), [slice(0, 256), slice(256, 384)])
    payload = torch.full((2048,), POISON, dtype=torch.uint8)
    gpu_launch.launch_place(found, [-1, 16], payload)
    wanted = reference.encode(pieces[1])
    assert payload[16 : 16 + len(wanted)].numpy().tobytes() == wanted
    assert (payload[:16] == POISON).all() and (payload[16 + len(wanted) :] == POISON).all()


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_damage_is_seen_and_stays_in_its_piece(seed):
    rng = np.random.default_rng(seed)
    piece = codes(256, seed)
    inner, places, payload, sources = coded([piece])
    head = head_bytes(piece.size)
    spots = [*rng.integers(0, 2 * 40, 2), TABLE_BYTES + seed % 4, *rng.integers(head, sources[0].stop - 8, 3)]
    for at in spots:
        wrong = payload.clone()
        wrong[8 + int(at)] ^= int(rng.integers(1, 256))
        assert decoded(wrong, sources, places, inner.numel())[1], at
    wrong = payload.clone()
    wrong[8 + head : -8] = torch.from_numpy(rng.integers(0, 256, wrong.numel() - 16 - head, dtype=np.uint8))
    assert decoded(wrong, sources, places, inner.numel())[1]
    for short in (head, head + 8, sources[0].stop - 16):
        assert decoded(payload, [slice(8, 8 + short)], places, inner.numel())[1]


def decoded_alone(coded, size):
    """Whether the kernels call a coded piece wrong that is all of a payload."""
    return decoded(torch.from_numpy(coded), [slice(0, coded.size)], [slice(0, size)], size)[1]


def test_words_that_no_lane_asks_for_are_seen():
    piece = codes(256)
    coded_piece = np.frombuffer(reference.encode(piece), dtype=np.uint8)
    assert not decoded_alone(coded_piece.copy(), piece.size)
    assert decoded_alone(with_words_before(coded_piece, piece.size), piece.size)


@pytest.mark.heavy
def test_ends_that_cross_are_seen():
    piece = codes(3 * BLOCK_BYTES)
    coded_piece = cpu.compress(piece)
    for number, end in wrong_ends(coded_piece, piece.size)[3:6:2]:
        assert decoded_alone(with_end(coded_piece, piece.size, number, end), piece.size), (number, end)


def test_a_corrupt_piece_leaves_the_pages_alone():
    block = kv_block(CODED)
    payload, out = bytearray(AnsCodec().encode(in_pool(block)).stages()[0]), scattered(block.spec, 3)
    before = bits_of(out.pools)
    significands, codes_length = LENGTHS.unpack_from(payload, HEADER_BYTES)[:2]
    assert codes_length < significands // 2
    payload[BODY + significands + codes_length - 100] ^= 1
    with pytest.raises(CodecError, match="coded piece"):
        gpu.decode(memoryview(payload), CODE, out)
    assert bits_of(out.pools) == before


def test_an_encoder_may_have_coded_any_piece():
    block = kv_block((1, 1, 64, 2, 16, 16))
    for tensor in (block.keys, block.values):
        tensor.copy_(2.0 ** tensor.view(torch.int16).bitwise_and(1).float())  # significands all alike
    codec, out = AnsCodec(), scattered(block.spec, 3)
    payload = codec.encode(in_pool(block)).stages()[0]
    pieces = pieces_in(payload)
    significands = [np.frombuffer(piece, dtype=np.uint8) for piece in (pieces[0], pieces[2])]
    coded_pieces = [bytes(cpu.compress(each)) for each in significands]
    assert len(coded_pieces[0]) < len(pieces[0]) and len(coded_pieces[1]) < len(pieces[2])
    other = joined(payload, [coded_pieces[0], pieces[1], coded_pieces[1], *pieces[3:]])
    wanted = copy_of(out)
    wanted.scatter(block)
    for decode in (
        lambda target: codec.decode(0, [memoryview(other)], target),
        lambda target: gpu.decode(memoryview(other), CODE, target),
    ):
        target = copy_of(out)
        decode(target)
        assert bits_of(target.pools) == bits_of(wanted.pools)


@pytest.mark.parametrize(("shape", "noise", "dtype"), SHAPES, ids=str)
def test_payload_is_the_cpus_and_restores_pages(shape, noise, dtype):
    for block in (kv_block(shape, dtype), random_block(spec_of(noise, dtype), 1)):
        pages, out = in_pool(block), scattered(block.spec, 3)
        wanted = copy_of(out)
        wanted.scatter(block)
        expected = AnsCodec().encode(pages)
        payload = bytes(expected.stages()[0])
        for on_device in (False, True):
            encoding = gpu.AnsEncoding(pages, CODE, on_device)
            (ours,) = encoding.stages()
            assert (ours.numpy().tobytes() if on_device else bytes(ours)) == payload
            assert encoding.stats() == expected.stats()
        for source in (memoryview(payload), ours):
            target = copy_of(out)
            gpu.decode(source, CODE, target)
            assert bits_of(target.pools) == bits_of(wanted.pools)


def test_counts_offsets_and_records_are_checked_as_on_the_host():
    """Escapes are in no coded piece here, so that what is wrong is found by the check alone."""
    block = kv_block((1, 2, 15, 1, 40, 48))
    block.keys.view(torch.int16)[:, :, ::5, :, ::9] ^= 0x2000
    inner_codec = WindowCodec("inner", {"bfloat16": CODE}, None)
    inner = np.frombuffer(inner_codec.encode(in_pool(block)).stages()[0], dtype=np.uint8)
    layout = parse_header(inner, block.spec, plans_of(block.spec, CODE))
    assert layout.parts[0].records > 4 and not layout.parts[0].raw

    def verdict(payload):
        wrong = torch.zeros(1, dtype=torch.int32)
        gpu_launch.launch_check(torch.from_numpy(payload), layout, CODE, wrong)
        return bool(wrong.item())

    assert not verdict(inner.copy())
    sections, start = layout.parts[0].plan.sections, layout.offsets[0]
    counts, groups = (start + sections[name].offset for name in ("counts", "groups"))
    records = layout.streams[0]
    stray = layout.parts[0].plan.code.chunk - 1
    for at, value in ((counts, 0xFF), (counts + 1, 0x80), (groups, 1), (groups + 4, 1), (groups + 3, 0x80)):
        payload = inner.copy()
        payload[at] ^= value
        assert verdict(payload), at
    payload = inner.copy()
    payload[records : records + 2].view("<u2")[0] |= stray
    assert verdict(payload)


def test_head_and_lengths_are_checked_before_any_launch():
    block = kv_block((1, 2, 16, 1, 32, 48))
    pages, out = in_pool(block), scattered(block.spec, 3)
    payload, before = bytes(AnsCodec().encode(pages).stages()[0]), bits_of(out.pools)
    assert parse_header(np.frombuffer(payload, np.uint8), block.spec, plans_of(block.spec, CODE))
    wrongs = [payload[:BODY], payload[:-1], payload + b"\0", b"", payload[:40]]
    for at in range(0, BODY, 7):
        wrongs.append(payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :])
    for wrong in wrongs:
        with pytest.raises(CodecError):
            gpu.decode(memoryview(wrong), CODE, out)
    for tensor in (torch.zeros(4, dtype=torch.int8), torch.zeros(64, 2, dtype=torch.uint8)[:, 0]):
        with pytest.raises(CodecError, match="contiguous bytes"):
            gpu.decode(tensor, CODE, out)
    assert bits_of(out.pools) == before
    assert len(pieces_of(parse_header(np.frombuffer(payload, np.uint8), block.spec, plans_of(block.spec, CODE)))) == 5
