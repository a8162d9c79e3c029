"""Damaged payloads of either stage are refused before a page is touched, and never reach a page that was not named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, decode_stages, random_block, scattered, spec_of
from progressive_cases import kv_pages, plans_of
from test_progressive import PROPERTY

from kvrail.codec.base import CodecError
from kvrail.codec.splitzip.one_stage.codec import splitzip_channel
from kvrail.codec.splitzip.progressive.codec import ProgressiveCodec
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.progressive.payload import parse_rest
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, WIDE

CODEC = ProgressiveCodec()
SPEC = spec_of((1, 2, 63, 2, 20, 24), "bfloat16")  # tiles with padding
PAGES = kv_pages(SPEC, 1, outliers=0.0)
PAYLOADS = [bytes(stage) for stage in CODEC.encode(PAGES).stages()]
SECOND = parse_rest(np.frombuffer(PAYLOADS[1], dtype=np.uint8), plans_of(SPEC))
STAGES = [0, 1]


def pages_before(stage):
    """Pages that a stage may be decoded into."""
    out = scattered(SPEC, 2)
    decode_stages(CODEC, PAYLOADS[:stage], out)
    return out


def up_to(stage, payload):
    """The payloads that a stage is decoded from, given the last."""
    return [*(memoryview(earlier) for earlier in PAYLOADS[:stage]), memoryview(payload)]


def assert_refused(stage, payload, match=None):
    out = pages_before(stage)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        CODEC.decode(stage, up_to(stage, payload), out)
    assert bits_of(out.pools) == before


def assert_pair_refused(first, second, match=None, codec=CODEC, spec=SPEC):
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        codec.decode(1, [memoryview(first), memoryview(second)], out)
    assert bits_of(out.pools) == before


def with_bytes(stage, offset, value):
    payload = bytearray(PAYLOADS[stage])
    payload[offset : offset + len(value)] = value
    return bytes(payload)


def test_the_payloads_themselves_are_good():
    assert not SECOND.keys.raw and not SECOND.values.raw and SECOND.keys.records and SECOND.values.records
    out = pages_before(2)
    assert bits_of(out.gather()) == bits_of(PAGES.gather())


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


@pytest.mark.parametrize("tensor", [0, 1])
def test_counts_and_groups_that_do_not_add_up_are_refused(tensor):
    sections = SECOND.parts[tensor].plan.sections
    counts, groups = (SECOND.dense_offsets[tensor] + sections[name].offset for name in ("counts", "groups"))
    first = int.from_bytes(PAYLOADS[1][counts : counts + 2], "little")
    assert_refused(1, with_bytes(1, counts, (first + 1).to_bytes(2, "little")), "records")
    assert_refused(1, with_bytes(1, counts, (first ^ WIDE).to_bytes(2, "little")), "extensions")
    assert_refused(1, with_bytes(1, counts, (WIDE - 1).to_bytes(2, "little")), "escapes of")
    for offset in (groups, groups + 4):
        assert_refused(1, with_bytes(1, offset, b"\1"), "offsets")


@pytest.mark.parametrize("tensor", [0, 1])
def test_record_that_lies_on_no_value_is_refused(tensor):
    """63 rows of 40 or 48 columns are not whole tiles, so that the highest positions are padding."""
    assert_refused(1, with_bytes(1, SECOND.escape_offsets[tensor], b"\xff\x0f"), "position 4095")


def test_number_of_records_is_bounded_before_any_sum():
    for offset in (16, 24, 32, 40):
        assert_refused(0, with_bytes(0, offset, b"\1"), "a first stage says that it has escapes")
        assert_refused(1, with_bytes(1, offset, b"\xff" * 8), "records and")


def test_a_stage_is_not_taken_for_another():
    (one,) = splitzip_channel().encode(PAGES).stages()
    for stage in STAGES:
        assert_refused(stage, PAYLOADS[1 - stage], "stage")
        assert_refused(stage, one, "SPLZ")


@pytest.mark.parametrize("stage", STAGES)
def test_another_cut_is_refused(stage):
    for cut in (Cut(1, 1), Cut(2, 2)):
        assert_refused(stage, ProgressiveCodec(cut).encode(PAGES).stages()[stage], "mantissa bits")


@pytest.mark.parametrize("stage", STAGES)
def test_another_spec_is_refused(stage):
    for change in ({"key_dim": 21}, {"num_pages": 1}, {"dtype": "float16"}):
        out = scattered(dataclasses.replace(SPEC, **change), 2)
        before = bits_of(out.pools)
        with pytest.raises(CodecError):
            CODEC.decode(stage, up_to(stage, PAYLOADS[stage]), out)
        assert bits_of(out.pools) == before


def test_second_stage_says_itself_what_travelled_raw():
    noise = random_block(PAGES.pools.spec, 7)
    for number, name in enumerate(("keys", "values")):
        pages = dataclasses.replace(PAGES, pools=dataclasses.replace(PAGES.pools, **{name: getattr(noise, name)}))
        second = bytes(CODEC.encode(pages).stages()[1])
        layout = parse_rest(np.frombuffer(second, dtype=np.uint8), plans_of(SPEC))
        assert [part.raw for part in layout.parts] == [number == 0, number == 1]
        wrong = second[:5] + bytes([3 - second[5]]) + second[6:]
        assert_refused(1, wrong, "records and 0 extensions for 0 values")


def test_second_stage_of_pages_that_no_code_can_tile_is_refused():
    spec = spec_of((1, 1, 300, 1, 4, 4), "bfloat16")
    codec = ProgressiveCodec(chunk=256)
    first, second = codec.encode(scattered(spec, 1)).stages()
    second = bytearray(second)
    assert second[5] == 3
    second[5] = 0
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match="pages of 300 tokens"):
        codec.decode(1, [first, memoryview(second)], out)
    assert bits_of(out.pools) == before


def test_a_first_stage_that_is_not_this_one_s_is_refused():
    first, second = PAYLOADS
    for end in (0, HEADER_BYTES - 1, HEADER_BYTES, len(first) - 1):
        assert_pair_refused(first[:end], second)
    for offset in range(HEADER_BYTES):
        assert_pair_refused(with_bytes(0, offset, bytes([first[offset] ^ 1])), second)
    assert_pair_refused(second, second, "stage")
    assert_pair_refused(second, first, "stage")
    for cut in (Cut(1, 1), Cut(2, 2)):
        assert_pair_refused(ProgressiveCodec(cut).encode(PAGES).stages()[0], second, "mantissa bits")
    assert_pair_refused(ProgressiveCodec(chunk=1024).encode(PAGES).stages()[0], second, "position bits")
    for change in ({"key_dim": 21}, {"num_pages": 1}, {"dtype": "float16"}):
        other = kv_pages(dataclasses.replace(SPEC, **change), 1, outliers=0.0)
        assert_pair_refused(CODEC.encode(other).stages()[0], second)


def test_stages_that_do_not_agree_on_what_travels_raw_are_refused():
    noise = random_block(PAGES.pools.spec, 7)
    for names in (("keys",), ("values",), ("keys", "values")):
        changed = {name: getattr(noise, name) for name in names}
        pages = dataclasses.replace(PAGES, pools=dataclasses.replace(PAGES.pools, **changed))
        first, second = CODEC.encode(pages).stages()
        assert_pair_refused(first, PAYLOADS[1], "of other blocks")
        assert_pair_refused(PAYLOADS[0], second, "of other blocks")


@PROPERTY
@given(where=st.integers(0, 2**20), change=st.integers(1, 255))
def test_any_byte_changed_of_an_earlier_payload_is_refused_or_stays_within_the_pages(where, change):
    first = bytearray(PAYLOADS[0])
    first[where % len(first)] ^= change
    out = pages_before(1)
    untouched = copy_of(out)
    try:
        CODEC.decode(1, [memoryview(first), memoryview(PAYLOADS[1])], out)
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
    out = pages_before(stage)
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
