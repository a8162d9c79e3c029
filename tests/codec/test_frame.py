import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.base import BlockSpec, CodecError
from codec.frame import ALIGNMENT, ITEM_BYTES, FrameFormatError, FrameHeader, pack, unpack

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 1 << 20

uint32 = st.integers(0, 2**32 - 1)
size = st.integers(1, 2**8)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@st.composite
def headers(draw):
    num_stages = draw(st.integers(1, 2**16 - 1))
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    return FrameHeader(
        request_id=draw(text),
        codec=draw(st.text(st.characters(max_codepoint=127), min_size=1, max_size=40)),
        stage=draw(st.integers(0, num_stages - 1)),
        num_stages=num_stages,
        spec=BlockSpec(dtype, *(draw(size) for _ in range(6)), draw(st.booleans())),
        first_layer=draw(uint32),
        first_page=draw(uint32),
        sequence=draw(uint32),
    )


HEADER = FrameHeader("req-0123456789abcdef", "raw", 0, 1, BlockSpec("bfloat16", 2, 3, 4, 2, 8, 8, False), 5, 6, 7)
SCALED = FrameHeader("größe", "lynx-exact", 2, 3, BlockSpec("float8_e4m3fn", 1, 2, 64, 3, 5, 9, True), 0, 1 << 31, 0)
GOLDEN_FRAMES = {
    "raw_bf16.bin": (HEADER, bytes(range(256)) * 3),
    "scaled_empty.bin": (SCALED, b""),
}


@given(headers(), st.binary(max_size=300))
def test_round_trip(header, payload):
    frame = pack(header, memoryview(payload))
    got, view = unpack(frame, LIMIT)
    assert got == header and view == payload
    assert (len(frame) - len(payload)) % ALIGNMENT == 0


def test_payload_is_a_view_into_the_frame():
    frame = pack(HEADER, memoryview(b"abc"))
    _, view = unpack(frame, LIMIT)
    assert view.obj is frame


@pytest.mark.parametrize("name", GOLDEN_FRAMES)
def test_golden_frames(name):
    header, payload = GOLDEN_FRAMES[name]
    golden = (GOLDEN / name).read_bytes()
    assert pack(header, memoryview(payload)) == golden
    got, view = unpack(golden, LIMIT)
    assert got == header and view == payload


@pytest.mark.parametrize("name", GOLDEN_FRAMES)
def test_any_single_flipped_bit_is_refused(name):
    golden = (GOLDEN / name).read_bytes()
    for index in range(len(golden)):
        for bit in range(8):
            torn = bytearray(golden)
            torn[index] ^= 1 << bit
            with pytest.raises(FrameFormatError):
                unpack(bytes(torn), LIMIT)


@pytest.mark.parametrize("name", GOLDEN_FRAMES)
def test_any_truncation_or_extension_is_refused(name):
    golden = (GOLDEN / name).read_bytes()
    for end in range(len(golden)):
        with pytest.raises(FrameFormatError):
            unpack(golden[:end], LIMIT)
    with pytest.raises(FrameFormatError):
        unpack(golden + b"\0", LIMIT)


@settings(max_examples=300)
@given(headers(), st.binary(max_size=64), st.data())
def test_damage_anywhere_is_refused(header, payload, data):
    frame = bytearray(pack(header, memoryview(payload)))
    start = data.draw(st.integers(0, len(frame) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=16))
    torn = frame[:start] + damage + frame[start + len(damage) :]
    if torn == frame:
        return
    with pytest.raises(FrameFormatError):
        unpack(bytes(torn), LIMIT)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(FrameFormatError):
        unpack(b"KVRF\1\0" + noise, LIMIT)


def test_payload_bound_is_checked_before_the_checksum():
    frame = pack(HEADER, memoryview(bytes(101)))
    assert unpack(frame, 101)[1].nbytes == 101
    with pytest.raises(FrameFormatError, match="101 bytes; at most 100"):
        unpack(frame[:-1], 100)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, b"KVRG", "magic b'KVRG'"), (4, b"\2\0", "version 2"), (6, b"\xff\xff", "header length 65535")],
)
def test_message_names_field_and_value(offset, value, message):
    torn = bytearray(pack(HEADER, memoryview(b"x")))
    torn[offset : offset + len(value)] = value
    with pytest.raises(FrameFormatError, match=message):
        unpack(bytes(torn), LIMIT)


def resealed(offset, value):
    """A frame with other bytes at `offset` and a checksum that matches them: a wrong sender, not a torn frame."""
    import xxhash

    frame = bytearray(pack(HEADER, memoryview(b"payload")))
    frame[offset : offset + len(value)] = value
    frame[8:16] = bytes(8)
    frame[8:16] = xxhash.xxh3_64(frame).intdigest().to_bytes(8, "little")
    return bytes(frame)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (24, b"\xff" * 8, "raw length"),
        (36, b"\1\0", "stage 1 of 1"),
        (38, b"\0\0", "stage 0 of 0"),
        (40, b"\0" * 4, "num_layers 0"),
        (40, b"\xff" * 24, "raw length"),
        (72, b"\2", "scaled 2"),
        (73, b"\xff", "strings"),
        (73, b"\0", "dtype 'rawbfloa'"),
        (76, b"\xff", "not text"),
        (79, b"complex9", "dtype 'complex9'"),
        (87, b"\xff\xff", "not text"),
    ],
)
def test_wrong_field_under_a_right_checksum_is_refused(offset, value, message):
    with pytest.raises(FrameFormatError, match=message):
        unpack(resealed(offset, value), LIMIT)


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": 2**32},
        {"sequence": -1},
        {"first_page": 2**32},
        {"stage": 1},
        {"codec": ""},
        {"codec": "größe"},
        {"request_id": "x" * 256},
        {"spec": dataclasses.replace(HEADER.spec, dtype="int8")},
        {"spec": dataclasses.replace(HEADER.spec, num_pages=0)},
    ],
    ids=str,
)
def test_header_that_does_not_fit_is_not_packed(change):
    with pytest.raises(CodecError):
        pack(dataclasses.replace(HEADER, **change), memoryview(b""))
