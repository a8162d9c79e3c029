"""Damaged SplitZip payloads are refused before a page is touched, and never reach a page that was not named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, scattered, spec_of
from splitzip_cases import codebook
from test_splitzip import PROPERTY, kv_pages

from kvrail.codec.base import CodecError
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.one_stage.codec import splitzip, splitzip_channel
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import WIDE, parse
from kvrail.codec.splitzip.tiles.plan import plans_of

CODECS = {"splitzip": splitzip(codebook()), "splitzip-channel": splitzip_channel()}
SPEC = spec_of((1, 2, 63, 2, 20, 24), "bfloat16")  # tiles with padding
PAGES = kv_pages(SPEC, 1, outliers=0.0)
PAYLOADS = {name: bytes(codec.encode(PAGES).stages()[0]) for name, codec in CODECS.items()}
NAMES = sorted(CODECS)


def layout_of(name):
    code = WindowCode(4, False) if name == "splitzip" else WindowCode(3, True)
    return parse(np.frombuffer(PAYLOADS[name], dtype=np.uint8), SPEC, plans_of(SPEC, code))


def assert_refused(name, payload, match=None):
    out = scattered(SPEC, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        CODECS[name].decode(0, [memoryview(payload)], out)
    assert bits_of(out.pools) == before


def with_bytes(name, offset, value):
    payload = bytearray(PAYLOADS[name])
    payload[offset : offset + len(value)] = value
    return bytes(payload)


def word_at(name, offset, size=2):
    return int.from_bytes(PAYLOADS[name][offset : offset + size], "little")


def section_of(name, tensor, section):
    """Where a section of the keys (0) or the values (1) begins in the payload."""
    layout = layout_of(name)
    return layout.offsets[tensor] + layout.parts[tensor].plan.sections[section].offset


@pytest.mark.parametrize("name", NAMES)
def test_the_payload_itself_is_good(name):
    layout, out = layout_of(name), scattered(SPEC, 2)
    assert not layout.parts[0].raw and not layout.parts[1].raw and layout.parts[0].records and layout.parts[1].records
    CODECS[name].decode(0, [memoryview(PAYLOADS[name])], out)
    assert bits_of(out.gather()) == bits_of(PAGES.gather())


@pytest.mark.parametrize("name", NAMES)
def test_any_other_header_byte_is_refused(name):
    for offset in range(HEADER_BYTES):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            assert_refused(name, with_bytes(name, offset, bytes([PAYLOADS[name][offset] ^ change])))


@pytest.mark.parametrize("name", NAMES)
def test_any_truncation_or_extension_is_refused(name):
    payload = PAYLOADS[name]
    for end in {*range(0, len(payload), 97), HEADER_BYTES - 1, HEADER_BYTES, len(payload) - 1}:
        assert_refused(name, payload[:end])
    assert_refused(name, payload + bytes(16))


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_counts_and_groups_that_do_not_add_up_are_refused(name, tensor):
    counts, groups = section_of(name, tensor, "counts"), section_of(name, tensor, "groups")
    first = word_at(name, counts)
    assert_refused(name, with_bytes(name, counts, (first + 1).to_bytes(2, "little")), "records")
    assert_refused(name, with_bytes(name, counts, (first ^ WIDE).to_bytes(2, "little")), "extensions")
    assert_refused(name, with_bytes(name, counts, (WIDE - 1).to_bytes(2, "little")), "escapes of")
    for offset in (groups, groups + 4):
        assert_refused(name, with_bytes(name, offset, b"\1"), "offsets")


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_record_that_lies_on_no_value_is_refused(name, tensor):
    """63 rows of 40 or 48 columns are not whole tiles, so that the highest positions are padding."""
    where = layout_of(name).streams[tensor]
    assert_refused(name, with_bytes(name, where, b"\xff\x0f"), "position 4095")


@pytest.mark.parametrize("name", NAMES)
def test_number_of_records_is_bounded_before_any_sum(name):
    for offset in (4, 8, 12, 16):
        assert_refused(name, with_bytes(name, offset, b"\xff" * 4), "records and")


@pytest.mark.parametrize("name", NAMES)
def test_another_spec_is_refused(name):
    for change in ({"key_dim": 21}, {"num_pages": 1}, {"dtype": "float16"}):
        out = scattered(dataclasses.replace(SPEC, **change), 2)
        before = bits_of(out.pools)
        with pytest.raises(CodecError):
            CODECS[name].decode(0, [memoryview(PAYLOADS[name])], out)
        assert bits_of(out.pools) == before


@PROPERTY
@given(name=st.sampled_from(NAMES), where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_is_refused_or_stays_within_the_pages(name, where, change):
    payload = bytearray(PAYLOADS[name])
    payload[where % len(payload)] ^= change
    out = scattered(SPEC, 2)
    untouched = copy_of(out)
    try:
        CODECS[name].decode(0, [memoryview(payload)], out)
    except CodecError:
        assert bits_of(out.pools) == bits_of(untouched.pools)
    else:
        untouched.scatter(out.gather())  # so that only a page that was not named can differ
        assert bits_of(out.pools) == bits_of(untouched.pools)


@PROPERTY
@given(st.sampled_from(NAMES), st.binary(max_size=2000))
def test_noise_after_a_good_header_is_refused(name, noise):
    assert_refused(name, PAYLOADS[name][:HEADER_BYTES] + noise)
