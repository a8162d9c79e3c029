import dataclasses
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrail.codec.base import BlockSpec, CodecError
from kvrail.codec.core.digest import Digest, DigestKind, digest_of
from kvrail.codec.core.floats import FLOATS
from kvrail.codec.frame import (
    MAX_HEAD_BYTES,
    FrameFormatError,
    FrameHeader,
    check_payload,
    pack_head,
    unpack_head,
)

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 1 << 20

uint32 = st.integers(0, 2**32 - 1)
size = st.integers(1, 2**8)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@st.composite
def headers(draw):
    num_stages = draw(st.integers(1, 2**16 - 1))
    dtype = draw(st.sampled_from(sorted(FLOATS)))
    return FrameHeader(
        request_id=draw(text),
        codec=draw(st.text(st.characters(max_codepoint=127), min_size=1, max_size=40)),
        stage=draw(st.integers(0, num_stages - 1)),
        num_stages=num_stages,
        spec=BlockSpec(dtype, *(draw(size) for _ in range(6)), draw(st.booleans())),
        first_layer=draw(uint32),
        first_page=draw(uint32),
        sequence=draw(uint32),
        first_head=draw(uint32),
        parameters_id=draw(st.integers(0, 2**64 - 1)),
    )


HEADER = FrameHeader("req-0123456789abcdef", "raw", 0, 1, BlockSpec("bfloat16", 2, 3, 4, 2, 8, 8, False), 5, 6, 7)
SCALED = FrameHeader(
    "größe",
    "lynx-exact",
    2,
    3,
    BlockSpec("float8_e4m3fn", 1, 2, 64, 3, 5, 9, True),
    0,
    1 << 31,
    0,
    4,
    0x123456789ABCDEF,
)
PAYLOAD = bytes(range(256)) * 3
GOLDEN_HEADS = {"head_raw_bf16.bin": (HEADER, PAYLOAD), "head_scaled_empty.bin": (SCALED, b"")}


def by_the_table(header, payload, kind=1, digest=None):
    """The head as the table in kvrail/codec/frame.py has it, field by field."""
    spec, texts = header.spec, [header.codec.encode(), header.spec.dtype.encode(), header.request_id.encode()]
    item = 1 if "float8" in spec.dtype else 4 if spec.dtype == "float32" else 2
    heads = spec.num_layers * spec.num_pages * spec.page_size * spec.num_kv_heads
    head = b"KVRF" + struct.pack("<HHQQ", 3, 97 + sum(map(len, texts)), 0, len(payload))
    head += struct.pack("<Q", xxhash.xxh3_64_intdigest(payload) if digest is None else digest)
    head += struct.pack("<Q", heads * ((spec.key_dim + spec.value_dim) * item + 8 * spec.scaled))
    head += struct.pack("<Q", header.parameters_id)
    head += struct.pack("<IHH", header.sequence, header.stage, header.num_stages)
    head += struct.pack("<4I", spec.num_layers, spec.num_pages, spec.page_size, spec.num_kv_heads)
    head += struct.pack("<2I", spec.key_dim, spec.value_dim)
    head += struct.pack("<3I", header.first_layer, header.first_head, header.first_page)
    head += bytes([spec.scaled, kind, *map(len, texts)]) + b"".join(texts)
    return head[:8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + head[16:]


def unpacked(head, payload):
    """The header of a frame, all of it checked."""
    header, digest = unpack_head(head, len(payload), LIMIT)
    check_payload(digest, memoryview(payload))
    return header


@given(headers(), st.binary(max_size=300))
def test_round_trip(header, payload):
    head = pack_head(header, digest_of(memoryview(payload)))
    assert head == by_the_table(header, payload)
    assert unpacked(head, payload) == header
    assert len(head) <= MAX_HEAD_BYTES


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_golden_heads(name):
    header, payload = GOLDEN_HEADS[name]
    golden = (GOLDEN / name).read_bytes()
    assert pack_head(header, digest_of(memoryview(payload))) == golden
    assert unpacked(golden, payload) == header


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_any_single_flipped_bit_is_refused(name):
    _, payload = GOLDEN_HEADS[name]
    frame, size = (GOLDEN / name).read_bytes() + payload, (GOLDEN / name).stat().st_size
    for index in range(len(frame)):
        for bit in range(8):
            torn = bytearray(frame)
            torn[index] ^= 1 << bit
            with pytest.raises(FrameFormatError):
                unpacked(bytes(torn[:size]), bytes(torn[size:]))


@pytest.mark.parametrize("name", GOLDEN_HEADS)
def test_any_truncation_or_extension_is_refused(name):
    _, payload = GOLDEN_HEADS[name]
    golden = (GOLDEN / name).read_bytes()
    for head in (*(golden[:end] for end in range(len(golden))), golden + b"\0"):
        with pytest.raises(FrameFormatError):
            unpacked(head, payload)
    _, digest = unpack_head(golden, len(payload), LIMIT)
    for wrong in (*(payload[:end] for end in range(len(payload))), payload + b"\0"):
        with pytest.raises(FrameFormatError, match="announced"):
            unpack_head(golden, len(wrong), LIMIT)
        with pytest.raises(FrameFormatError, match="bytes; its head says"):
            check_payload(digest, memoryview(wrong))


@settings(max_examples=300)
@given(headers(), st.binary(max_size=64), st.data())
def test_damage_anywhere_is_refused(header, payload, data):
    head = pack_head(header, digest_of(memoryview(payload)))
    frame = bytearray(head + payload)
    start = data.draw(st.integers(0, len(frame) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=16))
    torn = frame[:start] + damage + frame[start + len(damage) :]
    if torn == frame:
        return
    with pytest.raises(FrameFormatError):
        unpacked(bytes(torn[: len(head)]), bytes(torn[len(head) :]))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    with pytest.raises(FrameFormatError):
        unpack_head(b"KVRF\3\0" + noise, 0, LIMIT)


def test_payload_bound_is_checked_before_the_checksum():
    head = pack_head(HEADER, digest_of(memoryview(bytes(101))))
    assert unpack_head(head, 101, 101)[1].payload_bytes == 101
    with pytest.raises(FrameFormatError, match="101 bytes; at most 100"):
        unpack_head(head[:-1] + b"?", 101, 100)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"KVRG", "magic b'KVRG'"),
        (4, b"\2\0", "version 2; this build reads 3: run all workers with the same release"),
        (6, b"\xff\xff", "that it has 65535"),
    ],
)
def test_message_names_field_and_value(offset, value, message):
    torn = bytearray(pack_head(HEADER, digest_of(memoryview(b"x"))))
    torn[offset : offset + len(value)] = value
    with pytest.raises(FrameFormatError, match=message):
        unpack_head(bytes(torn), 1, LIMIT)


def resealed(offset, value):
    """A head with other bytes at `offset` and a checksum that matches them: a wrong sender, not a torn frame."""
    head = bytearray(pack_head(HEADER, digest_of(memoryview(b"payload"))))
    head[offset : offset + len(value)] = value
    head[8:16] = bytes(8)
    head[8:16] = xxhash.xxh3_64(head).intdigest().to_bytes(8, "little")
    return bytes(head)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (32, b"\xff" * 8, "raw length"),
        (52, b"\1\0", "stage 1 of 1"),
        (54, b"\0\0", "stage 0 of 0"),
        (56, b"\0" * 4, "num_layers 0"),
        (56, b"\xff" * 24, "raw length"),
        (92, b"\2", "scaled 2"),
        (93, b"\0", "digest kind 0"),
        (93, b"\3", "digest kind 3"),
        (94, b"\xff", "strings"),
        (94, b"\0\x0b", "dtype 'rawbfloat16'"),
        (97, b"\xff", "not text"),
        (100, b"complex9", "dtype 'complex9"),
        (110, b"\xff\xff", "not text"),
    ],
)
def test_wrong_field_under_a_right_checksum_is_refused(offset, value, message):
    with pytest.raises(FrameFormatError, match=message):
        unpack_head(resealed(offset, value), 7, LIMIT)


def test_payload_of_another_frame_is_refused():
    _, digest = unpack_head(pack_head(HEADER, digest_of(memoryview(b"payload"))), 7, LIMIT)
    with pytest.raises(FrameFormatError, match=r"digest [0-9a-f]{16}; its head says [0-9a-f]{16} \(XXH3\)"):
        check_payload(digest, memoryview(b"payloae"))


@given(st.binary(max_size=40))
def test_digest_of_a_device_is_checked_on_a_host_too(payload):
    digest = digest_of(memoryview(payload), DigestKind.LANES)
    head = by_the_table(HEADER, payload, 2, digest.value)
    header, got = unpack_head(head, len(payload), LIMIT)
    assert header == HEADER and got == Digest(DigestKind.LANES, digest.value, len(payload))
    check_payload(got, memoryview(payload))
    check_payload(got, torch.frombuffer(bytearray(payload + b"x"), dtype=torch.uint8)[:-1])
    if payload:
        with pytest.raises(FrameFormatError, match="LANES"):
            check_payload(got, memoryview(bytes([payload[0] ^ 4]) + payload[1:]))


@pytest.mark.parametrize(
    "change",
    [
        {"sequence": 2**32},
        {"sequence": -1},
        {"first_page": 2**32},
        {"first_head": 2**32},
        {"parameters_id": 2**64},
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
        pack_head(dataclasses.replace(HEADER, **change), digest_of(memoryview(b"")))
