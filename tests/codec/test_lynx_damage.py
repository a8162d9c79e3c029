"""Damaged Lynx payloads are refused before a page is touched, and never reach a page that was not named."""

import dataclasses
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, decode_stages, scattered, spec_of
from lynx_cases import kv_pages
from test_lynx import PROPERTY

from kvrail.codec.base import CodecError
from kvrail.codec.core.sections import HEADER_BYTES, aligned
from kvrail.codec.papers.lynx.codec import lynx, lynx_exact
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL, parse

CODE = LynxCode(alpha=0.5, chunk=16)  # every section there is
CODEC = lynx_exact(CODE)
SPEC = spec_of((1, 2, 40, 2, 35, 24), "bfloat16")
PAGES = kv_pages(SPEC, 1, noise=0.005)
PAYLOADS = [bytes(payload) for payload in CODEC.encode(PAGES).stages()]
STAGES = [ANCHOR, RESIDUAL, EXACT]


def layout_of(stage):
    return parse(np.frombuffer(PAYLOADS[stage], dtype=np.uint8), SPEC, CODE, stage)


def up_to(stage, payload):
    """The payloads that a stage is decoded from, given the last."""
    return [*(memoryview(earlier) for earlier in PAYLOADS[: max(0, stage)]), memoryview(payload)]


def assert_refused(stage, payload, match=None, codec=CODEC, spec=SPEC):
    assert_all_refused(stage, up_to(stage, payload), match, codec, spec)


def assert_all_refused(stage, payloads, match=None, codec=CODEC, spec=SPEC):
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        codec.decode(stage, payloads, out)
    assert bits_of(out.pools) == before


def with_bytes(stage, offset, value):
    payload = bytearray(PAYLOADS[stage])
    payload[offset : offset + len(value)] = value
    return bytes(payload)


def section_at(stage, tensor, name):
    """Where a section of the keys (0) or the values (1) begins in the payload."""
    layout = layout_of(stage)
    return layout.offsets[tensor] + layout.parts[tensor].plan.sections[stage][name].offset


def test_the_payloads_themselves_are_good():
    out = scattered(SPEC, 2)
    decode_stages(CODEC, [memoryview(payload) for payload in PAYLOADS], out)
    assert bits_of(out.gather()) == bits_of(PAGES.gather())
    parts = layout_of(EXACT).parts
    assert all(part.words and part.escapes > 1 and not part.raw and not part.plan.raw for part in parts)


@pytest.mark.parametrize("stage", STAGES)
def test_any_other_header_byte_is_refused(stage):
    for offset in range(HEADER_BYTES):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            assert_refused(stage, with_bytes(stage, offset, bytes([PAYLOADS[stage][offset] ^ change])))


@pytest.mark.parametrize("stage", STAGES)
def test_any_truncation_or_extension_is_refused(stage):
    payload = PAYLOADS[stage]
    for end in {*range(0, len(payload), 97), HEADER_BYTES - 1, HEADER_BYTES, len(payload) - 1}:
        assert_refused(stage, payload[:end])
    assert_refused(stage, payload + bytes(16))


@pytest.mark.parametrize("stage", STAGES)
def test_another_stage_is_refused(stage):
    for due in {0, 1, 2} - {stage}:
        assert_refused(due, PAYLOADS[stage])
    for due in (-1, 3):
        assert_refused(due, PAYLOADS[stage], "stages 0 to 2")
    assert_refused(2, PAYLOADS[2], "stages 0 to 1", codec=lynx(CODE))


@pytest.mark.parametrize("stage", STAGES)
def test_another_spec_is_refused(stage):
    for change in ({"key_dim": 60}, {"num_pages": 1}, {"dtype": "float32"}, {"page_size": 70}):
        assert_refused(stage, PAYLOADS[stage], spec=dataclasses.replace(SPEC, **change))


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize(("stage", "name"), [(0, "minima"), (1, "minima")])
def test_minima_that_are_not_finite_are_refused(stage, name, tensor):
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        where = section_at(stage, tensor, name) + 4
        assert_refused(stage, with_bytes(stage, where, struct.pack("<H", bits)), "not finite")


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_scales_that_no_encoder_writes_are_refused(stage, tensor):
    for bits in (0x7F80, 0x8000, 0xBF80, 1, 0x0870):
        where = section_at(stage, tensor, "scales") + 2
        assert_refused(stage, with_bytes(stage, where, struct.pack("<H", bits)), f"{bits:#06x}")


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("stage", [ANCHOR, RESIDUAL])
def test_chunks_that_end_beyond_their_page_are_refused(stage, tensor):
    lows, widths = (section_at(stage, tensor, name) for name in ("lows", "widths"))
    payload = bytearray(with_bytes(stage, lows, b"\x80"))
    payload[widths] = 128
    assert_refused(stage, bytes(payload), "256 of 255")


@pytest.mark.parametrize("tensor", [0, 1])
def test_lengths_that_do_not_add_up_are_refused(tensor):
    where = section_at(EXACT, tensor, "lengths")
    (length,) = struct.unpack_from("<I", PAYLOADS[EXACT], where)
    assert_refused(EXACT, with_bytes(EXACT, where, struct.pack("<I", length + 1)), "words")
    assert_refused(EXACT, with_bytes(EXACT, where, b"\xff" * 4), "words")


@pytest.mark.parametrize("tensor", [0, 1])
def test_escapes_out_of_order_or_place_are_refused(tensor):
    layout = layout_of(EXACT)
    part, where = layout.parts[tensor], layout.streams[tensor] + aligned(4 * layout.parts[tensor].words)
    first, second = struct.unpack_from("<2I", PAYLOADS[EXACT], where)
    assert_refused(EXACT, with_bytes(EXACT, where, struct.pack("<2I", second, first)), "order")
    assert_refused(EXACT, with_bytes(EXACT, where + 4, struct.pack("<I", first)), "order")
    last = where + 4 * (part.escapes - 1)
    assert_refused(EXACT, with_bytes(EXACT, last, b"\xff" * 4), "where there is no value")
    beyond = part.plan.tiles * part.plan.rows * part.plan.tile_columns - 1  # the last tile has padding there
    if part.plan.columns % part.plan.tile_columns:
        assert_refused(EXACT, with_bytes(EXACT, last, struct.pack("<I", beyond)), "where there is no value")


def test_the_cases_have_a_tile_with_padding():
    assert any(part.plan.columns % part.plan.tile_columns for part in layout_of(EXACT).parts)


@pytest.mark.parametrize("field", range(4))
def test_numbers_of_words_and_escapes_are_bounded(field):
    assert_refused(EXACT, with_bytes(EXACT, 4 + 4 * field, b"\xff" * 4), "words and")
    for stage in (ANCHOR, RESIDUAL):
        assert_refused(stage, with_bytes(stage, 4 + 4 * field, b"\x01"), "words and")


def test_an_anchor_that_is_not_this_residual_s_is_refused():
    anchors, residuals, _ = PAYLOADS
    for end in (0, HEADER_BYTES - 1, HEADER_BYTES, len(anchors) - 1):
        assert_all_refused(RESIDUAL, [anchors[:end], residuals])
    for offset in range(HEADER_BYTES):
        assert_all_refused(RESIDUAL, [with_bytes(ANCHOR, offset, bytes([anchors[offset] ^ 1])), residuals])
    assert_all_refused(RESIDUAL, [residuals, residuals])
    for change in ({"key_dim": 60}, {"num_pages": 1}, {"dtype": "float32"}, {"page_size": 70}):
        other = kv_pages(dataclasses.replace(SPEC, **change), 1, noise=0.005)
        assert_all_refused(RESIDUAL, [CODEC.encode(other).stages()[0], residuals])
    assert_all_refused(RESIDUAL, [CODEC.encode(kv_pages(SPEC, 2)).stages()[0], residuals], "of other blocks")


@pytest.mark.parametrize("tensor", [0, 1])
@pytest.mark.parametrize("name", ["minima", "scales", "lows", "widths"])
def test_stages_that_do_not_say_the_same_of_chunks_are_refused(name, tensor):
    where = section_at(RESIDUAL, tensor, name)
    payload = with_bytes(RESIDUAL, where, bytes([PAYLOADS[RESIDUAL][where] ^ 1]))
    assert_refused(RESIDUAL, payload, f"other {name}|256 of 255")


@PROPERTY
@given(where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_of_an_anchor_is_refused_or_stays_within_the_pages(where, change):
    anchors = bytearray(PAYLOADS[ANCHOR])
    anchors[where % len(anchors)] ^= change
    out = scattered(SPEC, 2)
    untouched = copy_of(out)
    try:
        CODEC.decode(RESIDUAL, [memoryview(anchors), memoryview(PAYLOADS[RESIDUAL])], out)
    except CodecError:
        assert bits_of(out.pools) == bits_of(untouched.pools)
    else:
        untouched.scatter(out.gather())  # so that only a page that was not named can differ
        assert bits_of(out.pools) == bits_of(untouched.pools)


@PROPERTY
@given(stage=st.sampled_from(STAGES), where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_is_refused_or_stays_within_the_pages(stage, where, change):
    payload = bytearray(PAYLOADS[stage])
    payload[where % len(payload)] ^= change
    out = scattered(SPEC, 2)
    untouched = copy_of(out)
    try:
        CODEC.decode(stage, up_to(stage, payload), out)
    except CodecError:
        assert bits_of(out.pools) == bits_of(untouched.pools)
    else:
        untouched.scatter(out.gather())  # so that only a page that was not named can differ
        assert bits_of(out.pools) == bits_of(untouched.pools)


@PROPERTY
@given(st.sampled_from(STAGES), st.binary(max_size=2000))
def test_noise_after_a_good_header_is_refused(stage, noise):
    assert_refused(stage, PAYLOADS[stage][:HEADER_BYTES] + noise)


@PROPERTY
@given(seed=st.integers(0, 2**32))
def test_a_last_stage_over_other_pages_stays_within_them(seed):
    """The widths of its codes follow from what lies in the pages: random bits, NaNs among them."""
    out = scattered(SPEC, seed)
    untouched = copy_of(out)
    CODEC.decode(EXACT, up_to(EXACT, PAYLOADS[EXACT]), out)
    untouched.scatter(out.gather())
    assert bits_of(out.pools) == bits_of(untouched.pools)
