import json

import grpc
import pytest

from kvrail import errors
from kvrail.errors import KvrailError
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient
from kvrail.rpc.errors import MAX_MESSAGE_CHARS, TRAILER, from_rpc_error, maps_errors, to_status
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.server import build_server
from kvrail.wire.v1 import common_pb2, decode_pb2


def subclasses(cls):
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in subclasses(child))]


EXAMPLES = [
    *(cls(f"a {cls.__name__} says 3 × 4 = 12") for cls in subclasses(KvrailError) if cls.__module__ == errors.__name__),
    errors.InvalidRequestError("top_p is 2", param="top_p"),
    errors.ContextLengthError("too long", param="messages"),
    errors.OverloadedError("full", retry_after=2.5),
]


class Raising(DecodeService):
    """Raises what it is told to, after one reply where the request names a model."""

    def __init__(self):
        super().__init__()
        self.error = None

    async def generate(self, request, write, until):
        if request.model:
            await write(decode_pb2.GenerateReply(text="one"))
        raise self.error

    @maps_errors
    async def GetStatus(self, request, context):
        raise self.error


@pytest.fixture
async def pair():
    servicer = Raising()
    rpc = await build_server()
    rpc.add_decode(servicer)
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield servicer, DecodeClient(channel)
    await rpc.stop()


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: f"{type(error).__name__}-{error}")
async def test_every_error_survives_the_wire(pair, error):
    servicer, client = pair
    servicer.error = error
    with pytest.raises(KvrailError) as unary:
        await client.get_status(timeout_s=10)
    with pytest.raises(KvrailError) as early:
        await client.events.submit(decode_pb2.GenerateRequest()).read()
    stream = client.events.submit(decode_pb2.GenerateRequest(model="m"))
    assert (await stream.read()).text == "one"
    with pytest.raises(KvrailError) as late:
        await stream.read()
    for caught in (unary.value, early.value, late.value):
        assert type(caught) is type(error)
        assert str(caught) == str(error)
        assert vars(caught) == vars(error)


async def test_unexpected_exception_is_internal_and_logged_with_the_request_id(pair, caplog):
    servicer, client = pair
    servicer.error = ZeroDivisionError("secret")
    with pytest.raises(KvrailError, match="r-17") as caught:
        await client.events.submit(decode_pb2.GenerateRequest(request_id="r-17")).read()
    assert type(caught.value) is KvrailError and "secret" not in str(caught.value)
    (record,) = [record for record in caplog.records if record.name == "kvrail.rpc.errors"]
    assert "r-17" in record.getMessage() and record.exc_info[0] is ZeroDivisionError


async def test_long_message_is_cut_to_what_metadata_carries(pair):
    servicer, client = pair
    servicer.error = errors.FrameError("𝄞" * 100_000)
    with pytest.raises(errors.FrameError) as caught:
        await client.get_status(timeout_s=10)
    assert str(caught.value) == "𝄞" * (MAX_MESSAGE_CHARS - 1) + "…"


async def test_subclass_of_a_known_error_maps_to_its_base():
    class Special(errors.OverloadedError):
        pass

    code, message, trailer = to_status(Special("full", retry_after=3.0))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and message == "full"
    assert json.loads(trailer) == {"error": "OverloadedError", "retry_after": 3.0}


class Foreign(grpc.RpcError):
    def __init__(self, code, details="", trailers=()):
        self._fields = code, details, trailers

    def code(self):
        return self._fields[0]

    def details(self):
        return self._fields[1]

    def trailing_metadata(self):
        return self._fields[2]


@pytest.mark.parametrize(
    ("code", "details", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, "refused", errors.WorkerUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "late", errors.DeadlineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", errors.OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", errors.FrameError),
        (grpc.StatusCode.CANCELLED, None, errors.RequestCancelledError),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", errors.InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, "no such method", errors.IncompatibleError),
        (grpc.StatusCode.UNKNOWN, "?", KvrailError),
        (grpc.StatusCode.INTERNAL, "a fault", KvrailError),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", errors.WorkerUnavailableError),  # a connection broke off
    ],
)
def test_plain_status_of_an_unknown_peer(code, details, cls):
    error = from_rpc_error(Foreign(code, details), peer="10.0.0.1:7002")
    assert type(error) is cls
    assert "10.0.0.1:7002" in str(error) and code.name in str(error) and (details or "") in str(error)


@pytest.mark.parametrize(
    "trailer",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{}",
        b'{"error": "SystemExit"}',
        b'{"error": ["FrameError"]}',
        b'{"error": "OverloadedError"}',
        b'{"error": "OverloadedError", "retry_after": NaN}',
        b'{"error": "OverloadedError", "retry_after": "soon"}',
        b'{"error": "OverloadedError", "retry_after": 1e300}',
        b"[" * 100_000,
    ],
)
def test_hostile_trailer_falls_back_to_the_status(trailer):
    error = from_rpc_error(Foreign(grpc.StatusCode.UNAVAILABLE, "gone", ((TRAILER, trailer),)))
    assert type(error) is errors.WorkerUnavailableError


def test_what_a_peer_says_of_an_error_is_cut_and_forges_no_log_line():
    trailer = json.dumps({"error": "InvalidRequestError", "param": "p\n" * 100}).encode()
    for trailers in ((), ((TRAILER, trailer),)):
        error = from_rpc_error(
            Foreign(grpc.StatusCode.INVALID_ARGUMENT, "bad\nERROR forged" * 1000, trailers), peer="p"
        )
        assert "bad ERROR forged" in str(error) and len(str(error)) < 600
        assert str(error).isprintable() and (error.param or "").isprintable() and len(error.param or "") <= 100


def test_an_error_without_a_reason_says_so():
    trailer = b'{"error": "FrameError"}'
    for trailers in ((), ((TRAILER, trailer),)):
        assert "no reason" in str(from_rpc_error(Foreign(grpc.StatusCode.DATA_LOSS, "", trailers), peer="p"))


async def test_deadline_and_unreachable_worker(unused_tcp_port):
    async with open_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        with pytest.raises(errors.WorkerUnavailableError):
            await DecodeClient(channel).get_status(timeout_s=10)


async def test_oversized_message_is_refused():
    class Big(Raising):
        @maps_errors
        async def GetStatus(self, request, context):
            return common_pb2.WorkerStatus(codecs=["x" * 5000])

    rpc = await build_server()
    rpc.add_decode(Big())
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with open_channel(f"127.0.0.1:{port}", max_message_bytes=4096) as channel:
        with pytest.raises(errors.FrameError, match="larger than max"):
            await DecodeClient(channel).get_status(timeout_s=10)
    await rpc.stop()
