"""Damaged KVComp payloads are refused before a page is touched, and never reach a page that was not named."""

import dataclasses
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, scattered, spec_of
from lynx_cases import kv_pages
from test_kvcomp import CODES, PROPERTY

from kvrail.codec import registry
from kvrail.codec.base import CodecError
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.papers.kvcomp.payload import parse

CODE = CODES["kvcomp"]
SPEC = spec_of((2, 3, 40, 2, 35, 24), "bfloat16")


def pages_with_escapes():
    pages = kv_pages(SPEC, 1)
    for pool in pages.layer_pools():
        pool[1, pages.page_ids[1], 2, 0, 7] = torch.nan
        pool[1, pages.page_ids[2], 39, 1, 3] = -torch.inf
    return pages


PAYLOAD = bytes(registry.get("kvcomp").encode(pages_with_escapes()).stages()[0])
LAYOUT = parse(np.frombuffer(PAYLOAD, dtype=np.uint8), SPEC, CODE)


def assert_refused(payload, match=None, name="kvcomp", spec=SPEC):
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        registry.get(name).decode(0, [memoryview(payload)], out)
    assert bits_of(out.pools) == before


def with_bytes(offset, value):
    payload = bytearray(PAYLOAD)
    payload[offset : offset + len(value)] = value
    return bytes(payload)


def section_at(tensor, name):
    """Where a section of the keys (0) or the values (1) begins in the payload."""
    return LAYOUT.offsets[tensor] + LAYOUT.parts[tensor].plan.sections[name].offset


def test_the_payload_itself_is_good_and_has_everything_there_is():
    registry.get("kvcomp").decode(0, [memoryview(PAYLOAD)], scattered(SPEC, 2))
    assert [(part.raw, part.escapes) for part in LAYOUT.parts] == [(False, 2)] * 2


def test_any_other_header_byte_is_refused():
    for offset in range(HEADER_BYTES):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            assert_refused(with_bytes(offset, bytes([PAYLOAD[offset] ^ change])))


def test_any_truncation_or_extension_is_refused():
    for end in {*range(0, len(PAYLOAD), 97), HEADER_BYTES - 1, HEADER_BYTES, len(PAYLOAD) - 1}:
        assert_refused(PAYLOAD[:end], "bytes")
    assert_refused(PAYLOAD + bytes(16), "bytes")


def test_another_codec_or_spec_is_refused():
    assert_refused(PAYLOAD, name="kvcomp-block")
    for change in ({"key_dim": 60}, {"num_pages": 2}, {"dtype": "float32"}, {"page_size": 70}):
        assert_refused(PAYLOAD, spec=dataclasses.replace(SPEC, **change))


@pytest.mark.parametrize("tensor", [0, 1])
def test_code_lengths_of_no_complete_code_are_refused(tensor):
    where = section_at(tensor, "tables")
    size = LAYOUT.parts[tensor].plan.table_bytes
    for lengths in (bytes(size), b"\x11" * size, b"\xdd" * size, b"\x02" + bytes(size - 1)):
        assert_refused(with_bytes(where, lengths), "layer 0 of a payload are of no complete code")
    if LAYOUT.parts[tensor].plan.code.symbols % 2:
        last = bytes([PAYLOAD[where + size - 1] | 0x10])
        assert_refused(with_bytes(where + size - 1, last), "no complete code")


@pytest.mark.parametrize("tensor", [0, 1])
def test_minima_and_scales_that_no_encoder_writes_are_refused(tensor):
    for name, words, wrong in (
        ("minima", "not finite", (0x7F80, 0xFF80, 0x7FC0)),
        ("scales", "scale of bits", (0x7F80, 0x7FC0, 0x8000, 0xBF80, 0x0001, 0x087F)),
    ):
        for bits in wrong:
            assert_refused(with_bytes(section_at(tensor, name) + 4, struct.pack("<H", bits)), words)


@pytest.mark.parametrize("tensor", [0, 1])
def test_lengths_and_ends_that_do_not_add_up_are_refused(tensor):
    for name, value in (("lengths", b"\xff\xff"), ("ends", b"\xff\xff\xff\xff"), ("ends", bytes(4))):
        assert_refused(with_bytes(section_at(tensor, name), value), "say otherwise")


@pytest.mark.parametrize("tensor", [0, 1])
def test_lengths_that_add_up_but_are_not_those_of_the_codes_are_refused(tensor):
    where = section_at(tensor, "lengths")
    first, second = struct.unpack_from("<2H", PAYLOAD, where)
    assert_refused(with_bytes(where, struct.pack("<2H", first + 1, second - 1)), "vectors of a payload do not end")


@pytest.mark.parametrize("tensor", [0, 1])
def test_escapes_out_of_order_or_beyond_the_values_are_refused(tensor):
    where = LAYOUT.streams[tensor] + aligned(4 * LAYOUT.parts[tensor].words)
    first, second = struct.unpack_from("<2I", PAYLOAD, where)
    assert_refused(with_bytes(where, struct.pack("<2I", second, first)), "not in order")
    assert_refused(with_bytes(where, struct.pack("<2I", first, first)), "not in order")
    values = LAYOUT.parts[tensor].plan.values
    assert_refused(with_bytes(where, struct.pack("<2I", first, values)), f"position {values} of {values} values")


@PROPERTY
@given(data=st.data(), tensor=st.sampled_from([0, 1]))
def test_any_bit_of_a_stream_is_refused_or_stays_within_its_vector(data, tensor):
    """A changed code may be as long as the one that was there; what follows in the vector may be, too."""
    begin, words = LAYOUT.streams[tensor], LAYOUT.parts[tensor].words
    where = data.draw(st.integers(begin, begin + 4 * words - 1))
    out, good = scattered(SPEC, 2), scattered(SPEC, 2)
    registry.get("kvcomp").decode(0, [memoryview(PAYLOAD)], good)
    before = bits_of(out.pools)
    payload = with_bytes(where, bytes([PAYLOAD[where] ^ 1 << data.draw(st.integers(0, 7))]))
    try:
        registry.get("kvcomp").decode(0, [memoryview(payload)], out)
    except CodecError:
        assert bits_of(out.pools) == before
        return
    changed = [
        (one.view(torch.int16) != other.view(torch.int16)).flatten(0, 3).any(1)
        for one, other in zip(out.gather().tensors(), good.gather().tensors(), strict=True)
    ]
    assert int(changed[tensor].sum()) == 1 and not changed[1 - tensor].any()


@PROPERTY
@given(where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_is_refused_or_stays_within_the_pages(where, change):
    payload = bytearray(PAYLOAD)
    payload[where % len(payload)] ^= change
    out = scattered(SPEC, 2)
    untouched = copy_of(out)
    try:
        registry.get("kvcomp").decode(0, [memoryview(payload)], out)
    except CodecError:
        assert bits_of(out.pools) == bits_of(untouched.pools)
    else:
        untouched.scatter(out.gather())  # so that only a page that was not named can differ
        assert bits_of(out.pools) == bits_of(untouched.pools)


@PROPERTY
@given(seed=st.integers(0, 2**32), tensor=st.sampled_from([0, 1]))
def test_streams_of_random_bits_never_reach_beyond_their_memory(seed, tensor):
    payload = np.frombuffer(PAYLOAD, dtype=np.uint8).copy()
    begin, words = LAYOUT.streams[tensor], LAYOUT.parts[tensor].words
    payload[begin : begin + 4 * words] = np.random.default_rng(seed).integers(0, 256, 4 * words)
    assert_refused(payload.data, "vectors of a payload do not end")
