"""Damaged payloads of `int8` and `int4` are refused before a page is touched, and reach none that was not named."""

import dataclasses
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, scattered, spec_of
from lynx_cases import kv_pages
from test_integer import NAMES, PROPERTY

from kvrail.codec import registry
from kvrail.codec.base import CodecError
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.integer.format import INT4, INT8
from kvrail.codec.integer.payload import parse

CODES = {"int8": INT8, "int4": INT4}
SPEC = spec_of((2, 5, 33, 1, 35, 24), "bfloat16")


def pages_with_raw_ones():
    """Real-looking KV with a NaN in one page of the keys and an infinity in one of the values."""
    pages = kv_pages(SPEC, 1)
    for pool, number, odd in zip(pages.layer_pools(), (1, 3), (torch.nan, -torch.inf), strict=True):
        pool[1, pages.page_ids[number], 2, 0, 7] = odd
    return pages


PAYLOADS = {name: bytes(registry.get(name).encode(pages_with_raw_ones()).stages()[0]) for name in NAMES}


def layout_of(name):
    return parse(np.frombuffer(PAYLOADS[name], dtype=np.uint8), SPEC, CODES[name])


def assert_refused(name, payload, match=None, stage=0, spec=SPEC):
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        registry.get(name).decode(stage, [memoryview(payload)], out)
    assert bits_of(out.pools) == before


def with_bytes(name, offset, value):
    payload = bytearray(PAYLOADS[name])
    payload[offset : offset + len(value)] = value
    return bytes(payload)


def section_at(name, tensor, section):
    """Where a section of the keys (0) or the values (1) begins in the payload."""
    layout = layout_of(name)
    return layout.offsets[tensor] + layout.parts[tensor].plan.sections[section].offset


@pytest.mark.parametrize("name", NAMES)
def test_the_payload_itself_is_good_and_has_everything_there_is(name):
    registry.get(name).decode(0, [memoryview(PAYLOADS[name])], scattered(SPEC, 2))
    assert [(part.raw, part.raw_pages) for part in layout_of(name).parts] == [(False, 1)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_any_other_header_byte_is_refused(name):
    for offset in range(HEADER_BYTES):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            assert_refused(name, with_bytes(name, offset, bytes([PAYLOADS[name][offset] ^ change])))


@pytest.mark.parametrize("name", NAMES)
def test_any_truncation_or_extension_is_refused(name):
    payload = PAYLOADS[name]
    for end in {*range(0, len(payload), 97), HEADER_BYTES - 1, HEADER_BYTES, len(payload) - 1}:
        assert_refused(name, payload[:end], "bytes")
    assert_refused(name, payload + bytes(16), "bytes")


@pytest.mark.parametrize("name", NAMES)
def test_another_stage_codec_or_spec_is_refused(name):
    for stage in (-1, 1):
        assert_refused(name, PAYLOADS[name], f"{name} has stage 0 alone, not {stage}", stage=stage)
    (other,) = set(NAMES) - {name}
    assert_refused(other, PAYLOADS[name])
    for change in ({"key_dim": 60}, {"num_pages": 2}, {"dtype": "float32"}, {"page_size": 70}):
        assert_refused(name, PAYLOADS[name], spec=dataclasses.replace(SPEC, **change))


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_flags_that_do_not_add_up_are_refused(name, tensor):
    where = section_at(name, tensor, "flags")
    for flag in (b"\1", b"\2", b"\xff"):
        assert_refused(name, with_bytes(name, where, flag), "1 raw pages")
    assert_refused(name, with_bytes(name, where, bytes(10)), "1 raw pages")


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_that_counts_twice_is_refused(name):
    """Their sum is what the header says and the bytes are there, but one page would be given two."""
    layout, where = layout_of(name), section_at(name, 0, "flags")
    page = layout.parts[0].plan.page_bytes
    payload = bytearray(with_bytes(name, 4, struct.pack("<I", 2)))
    payload[where : where + 10] = PAYLOADS[name][where : where + 10].replace(b"\1", b"\2")
    payload[layout.streams[1] : layout.streams[1]] = bytes(-(-2 * page // 16) * 16 - layout.parts[0].variable_bytes)
    assert_refused(name, bytes(payload), "2 raw pages")


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_minima_and_scales_that_no_encoder_writes_are_refused(name, tensor):
    for section, words, wrong in (
        ("minima", "not finite", (0x7F80, 0xFF80, 0x7FC0)),
        ("scales", "scale of bits", (0x7F80, 0x7FC0, 0x8000, 0xBF80)),
    ):
        for bits in wrong:
            where = section_at(name, tensor, section) + 4
            assert_refused(name, with_bytes(name, where, struct.pack("<H", bits)), words)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_raw_pages_are_bounded(name):
    """More than pay off, also where their bytes would be there; or some in a tensor that travels as it is."""
    for tensor in (0, 1):
        for count in (2, 10, 2**32 - 1):
            assert_refused(name, with_bytes(name, 4 + 8 * tensor, struct.pack("<I", count)), r"raw pages|by its header")
    page = layout_of(name).parts[0].plan.page_bytes
    many = with_bytes(name, 4, struct.pack("<I", 10)) + bytes(-(-9 * page // 16) * 16)
    assert_refused(name, many, "raw False and 10 raw pages of 10")
    assert_refused(name, with_bytes(name, 0, b"\1"), "raw True and 1 raw pages")


@PROPERTY
@given(name=st.sampled_from(NAMES), where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_is_refused_or_stays_within_the_pages(name, where, change):
    payload = bytearray(PAYLOADS[name])
    payload[where % len(payload)] ^= change
    out = scattered(SPEC, 2)
    untouched = copy_of(out)
    try:
        registry.get(name).decode(0, [memoryview(payload)], out)
    except CodecError:
        assert bits_of(out.pools) == bits_of(untouched.pools)
    else:
        untouched.scatter(out.gather())  # so that only a page that was not named can differ
        assert bits_of(out.pools) == bits_of(untouched.pools)


@PROPERTY
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32))
def test_any_codes_minima_and_scales_that_pass_give_finite_pages(name, seed):
    """Random sections, of which no encoder would make any, bring no NaN and no infinity."""
    payload = np.frombuffer(PAYLOADS[name], dtype=np.uint8).copy()
    layout, generator = layout_of(name), np.random.default_rng(seed)
    for number, part in enumerate(layout.parts):
        for section, limit in (("minima", 0x7F80), ("scales", 0x7F80), ("codes", 0x10000)):
            at, size = section_at(name, number, section), part.plan.sections[section].size // 2 * 2
            signs = generator.integers(0, 2, size // 2) << 15 if section == "minima" else 0
            payload[at : at + size] = (generator.integers(0, limit, size // 2) | signs).astype("<u2").view(np.uint8)
    out = scattered(SPEC, 2)
    registry.get(name).decode(0, [payload.data], out)
    found = out.gather()
    for tensor, odd in zip(found.tensors(), (1, 3), strict=True):
        finite = tensor.isfinite().flatten(2).all(2)
        assert not finite[1, odd] and finite.sum() == 9
