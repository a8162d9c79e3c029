"""Who may call whom over TLS, and what is told to who may not."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from kvrail.errors import PeerRefusedError, WorkerUnavailableError
from kvrail.rpc import channel as channel_module
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient, PrefillStatusClient
from kvrail.rpc.errors import maps_errors
from kvrail.rpc.events_server import DecodeService
from kvrail.rpc.prefill.client import GrpcPrefillClient
from kvrail.rpc.server import build_server
from kvrail.security.tls import Material, Tls
from kvrail.wire.v1 import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc
from tests.certificates import Authority
from tests.inproc.prefill import serve


class Decode(DecodeService):
    """Counts to two; the second one when released."""

    def __init__(self):
        super().__init__()
        self.release = asyncio.Event()

    async def generate(self, request, write, until):
        await write(decode_pb2.GenerateReply(text="one"))
        await self.release.wait()
        await write(decode_pb2.GenerateReply(text="two"))

    @maps_errors
    async def GetStatus(self, request, context):
        return common_pb2.WorkerStatus(running=7)


class Prefill(prefill_pb2_grpc.PrefillServicer):
    @maps_errors
    async def Prefill(self, request, context):
        async def handler(request, replies):
            raise WorkerUnavailableError("let in")

        await serve(handler, request, context.write)

    @maps_errors
    async def GetStatus(self, request, context):
        return common_pb2.WorkerStatus(running=7)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("foreign"))


@pytest.fixture
async def worker(authority):
    """Both services behind one port, with a decode worker's certificate."""
    servicer = Decode()
    rpc = await build_server(tls=authority.tls("decode"))
    rpc.add_decode(servicer)
    rpc.add_prefill(Prefill())
    servicer.port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    yield servicer
    await rpc.stop()


async def status(port, **options):
    async with open_channel(f"127.0.0.1:{port}", **options) as channel:
        return (await DecodeClient(channel).get_status(timeout_s=20)).running


async def prefill_status(port, **options):
    async with open_channel(f"127.0.0.1:{port}", **options) as channel:
        return (await PrefillStatusClient(channel).get_status(timeout_s=20)).running


async def generate(port, **options):
    async with (
        open_channel(f"127.0.0.1:{port}", **options) as channel,
        DecodeClient(channel).events.submit(decode_pb2.GenerateRequest(), timeout_s=20) as replies,
    ):
        return (await replies.read()).text


async def prefill(port, **options):
    async with open_channel(f"127.0.0.1:{port}", **options) as channel:
        call = GrpcPrefillClient(channel, "p:1").prefill(prefill_pb2.PrefillRequest(), timeout_s=20)
        async with call:
            return await call.accepted()


ALLOWED = {
    status: {"router"},
    generate: {"router"},
    prefill: {"decode"},
    prefill_status: {"router", "decode"},
}


@pytest.mark.parametrize("call", ALLOWED)
@pytest.mark.parametrize("role", ["router", "prefill", "decode", "metrics"])
async def test_a_role_may_call_what_is_its_own(worker, authority, call, role, caplog):
    tls = authority.tls(role)
    if call is prefill and role in ALLOWED[call]:
        with pytest.raises(WorkerUnavailableError, match="let in"):
            await call(worker.port, tls=tls)
    elif role in ALLOWED[call]:
        assert await call(worker.port, tls=tls) in (7, "one")
    else:
        with pytest.raises(PeerRefusedError, match=f"certificate has {role}"):
            await call(worker.port, tls=tls)
        assert f"certificate has {role}" in caplog.text, "the worker's log does not say whom it refused"


async def refused(worker, capfd, **options):
    with pytest.raises(WorkerUnavailableError, match="compare --tls-ca") as caught:
        await status(worker.port, **options)
    assert not isinstance(caught.value, PeerRefusedError)
    return str(caught.value), capfd.readouterr().err


class Without(Tls):
    """Trusts the CA and shows nothing."""

    def material(self):
        found = super().material()
        return type(found)(found.ca, None, None, found.expires, found.number)


class Unchecked(Tls):
    """Shows a certificate that its own check would refuse."""

    @classmethod
    def showing(cls, settings, ca=None):
        self = cls.__new__(cls)
        self.role, self.verify, self.paths, self.ca = "router", "host", settings, ca
        return self

    def material(self):
        ca, cert, key = (Path(path).read_bytes() for path in self.paths.values())
        return Material(self.ca or ca, cert, key, None, 1)


async def test_without_a_certificate(worker, authority, capfd):
    paths = authority.write("router")
    _, log = await refused(worker, capfd, tls=Without(*paths.values(), "router", ""))
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in log


async def test_without_tls(worker, capfd):
    await refused(worker, capfd)


async def test_of_a_foreign_ca(worker, authority, foreign, capfd):
    ours = authority.made.pem
    _, log = await refused(worker, capfd, tls=Unchecked.showing(foreign.write("router"), ca=ours))
    assert "CERTIFICATE_VERIFY_FAILED" in log


async def test_a_worker_of_a_foreign_ca(worker, foreign, capfd):
    told, _ = await refused(worker, capfd, tls=Unchecked.showing(foreign.write("router")))
    assert "CERTIFICATE_VERIFY_FAILED" in told


async def test_an_expired_certificate(worker, authority, capfd):
    _, log = await refused(worker, capfd, tls=Unchecked.showing(authority.write("router", "old", days=-1)))
    assert "certificate has expired" in log


async def test_a_worker_at_another_host(authority, capfd):
    authority.write("decode", hosts="elsewhere.example")
    tls = Tls(*authority.settings("decode").values(), "decode", "")
    rpc = await build_server(tls=tls)
    servicer = Decode()
    rpc.add_decode(servicer)
    servicer.port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    told, _ = await refused(servicer, capfd, tls=authority.tls("router"))
    assert "Hostname Verification" in told
    by_role = authority.tls("router", verify="role")
    assert await status(servicer.port, tls=by_role, role="decode") == 7
    await refused(servicer, capfd, tls=by_role, role="prefill")
    await rpc.stop()


async def test_certificates_change_under_a_running_stream(worker, authority, monkeypatch, capfd):
    """New calls use the new certificates of both ends; the stream that runs ends as it began."""
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    opened = []
    connect = grpc.aio.secure_channel
    monkeypatch.setattr(
        channel_module.grpc.aio, "secure_channel", lambda *a, **k: opened.append(connect(*a, **k)) or opened[-1]
    )
    tls = authority.tls("router")
    async with open_channel(f"127.0.0.1:{worker.port}", tls=tls) as channel:
        client = DecodeClient(channel)
        async with client.events.submit(decode_pb2.GenerateRequest(), timeout_s=60) as replies:
            assert (await replies.read()).text == "one"
            before = tls.material()
            authority.made = type(authority.made)(*_other_ca())  # another CA altogether
            (authority.folder / "ca.pem").write_bytes(authority.made.pem)
            for role in ("decode", "router"):
                authority.write(role)
            assert (await client.get_status(timeout_s=20)).running == 7
            assert tls.material().number > before.number and len(opened) == 2
            old = Unchecked.showing(dict.fromkeys(("ca", "cert", "key"), ""))
            old.material = lambda: before
            await refused(worker, capfd, tls=old)
            worker.release.set()
            assert [reply.text async for reply in replies] == ["two"]
        await client.close()
        await asyncio.wait_for(_closed(opened[0]), 20)


def _other_ca():
    from kvrail.cli import certs

    made = certs.make_authority(30)
    return made.certificate, made.key


async def _closed(channel):
    while channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
        await asyncio.sleep(0.01)
