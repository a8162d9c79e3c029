import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvrail.errors import FrameError
from kvrail.wire.replies import decode_reply, encode_reply, seal
from kvrail.wire.v1.common_pb2 import Mark
from kvrail.wire.v1.prefill_pb2 import Accepted, FirstToken, PrefillReply, TransferDone

CONTROL = [
    ("accepted", Accepted(codec="raw", page_count=3)),
    ("accepted", Accepted()),
    ("first_token", FirstToken(token_ids=[1, 2])),
    ("done", TransferDone(frame_count=2, marks=[Mark(stage="finished", seconds=1.5)])),
]


@pytest.mark.parametrize(("field", "reply"), CONTROL)
def test_control_is_what_protobuf_writes_and_reads(field, reply):
    wire = encode_reply(reply)
    assert wire == PrefillReply(**{field: reply}).SerializeToString()
    assert decode_reply(wire) == reply


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 5_000_000])
def test_frame_is_what_protobuf_writes_and_reads(size):
    frame = bytes(range(256)) * (size // 256) + bytes(size % 256)
    wire = encode_reply(frame)
    assert wire == encode_reply(seal(frame[:3], memoryview(frame)[3:])) == PrefillReply(frame=frame).SerializeToString()
    decoded = decode_reply(wire)
    assert decoded == frame and decoded.obj is wire


@given(st.binary(max_size=40), st.booleans())
def test_reads_what_protobuf_reads_and_refuses_what_it_refuses(noise, framed):
    wire = b"\x1a" + noise if framed else noise
    try:
        parsed = PrefillReply.FromString(wire)
        kind = parsed.WhichOneof("reply")
    except DecodeError:
        kind = None
    if kind is None:
        with pytest.raises(FrameError):
            decode_reply(wire)
    else:
        assert decode_reply(wire) == getattr(parsed, kind)


def test_frame_in_another_of_protobufs_ways():
    assert decode_reply(b"\x1a\x81\x00x") == b"x"  # a length with a needless byte
    assert decode_reply(b"\x1a\x01x\x1a\x01y") == b"y"  # the last of two wins
    with pytest.raises(FrameError):
        decode_reply(b"\x1a\x05x")
    with pytest.raises(FrameError, match="empty"):
        decode_reply(b"")
