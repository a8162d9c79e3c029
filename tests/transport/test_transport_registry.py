"""Transports by name: this package's, the order of `auto`, and one that another package plugs in by entry point."""

import asyncio
import textwrap

import pytest
import torch

from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.errors import ConfigError
from kvrail.transport import registry
from kvrail.transport.base import Peer
from kvrail.transport.registry import TransportInfo, TransportOptions
from kvrail.worker.transports import Transports

CPU = torch.device("cpu")


@pytest.fixture
def plugged(tmp_path, monkeypatch):
    """An installed package that offers the transport `near`, TCP under another name, and two broken ones."""
    (tmp_path / "near_by.py").write_text(
        textwrap.dedent("""
        from kvrail.transport.registry import TransportInfo
        from kvrail.transport.tcp import TcpTransport

        class Near(TcpTransport):
            name = "near"

        async def start(options):
            return await Near.start(options.pool, host=options.host, port=options.port)

        TRANSPORT = TransportInfo("near", start)
        """)
    )
    info = tmp_path / "near_by-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: near-by\nVersion: 1.0\n")
    points = ("near = near_by:TRANSPORT", "gone = near_by:NOTHING", "misnamed = near_by:TRANSPORT")
    (info / "entry_points.txt").write_text("[kvrail.transports]\n" + "\n".join(points) + "\n")
    monkeypatch.syspath_prepend(tmp_path)


def settings(cls, **given):
    return cls(model="m", **given)


def test_auto_tries_ucx_before_tcp_and_no_plugin(plugged):
    assert [info.name for info in registry.candidates("auto")] == ["ucx", "tcp"]
    assert registry.names() == ("ucx", "tcp", "gone", "misnamed", "near")


def test_a_name_that_leads_nowhere_is_refused_with_the_remedy(plugged):
    with pytest.raises(ConfigError, match="'grpc' is unknown; choose one of auto, ucx, tcp, gone, misnamed, near"):
        registry.get("grpc")
    with pytest.raises(ConfigError, match="'gone' does not load"):
        registry.get("gone")
    with pytest.raises(ConfigError, match="no TransportInfo of that name"):
        registry.get("misnamed")


async def test_a_plugged_transport_carries_payloads_of_workers_that_name_it(plugged):
    sending = await Transports.start(settings(PrefillSettings, transport="near", host="127.0.0.1"), CPU)
    receiving = await Transports.start(settings(DecodeSettings, transport="near", transfer_memory_mib=8), CPU)
    assert sending.names == receiving.names == ["near"]
    ours, theirs = sending.get("near"), receiving.get("near")
    sender = await ours.sender(Peer(b""), 7)
    receiver = await theirs.receiver(Peer(ours.address, "127.0.0.1"), 7)
    _, region = await asyncio.gather(sender.send(memoryview(b"payload")), receiver.receive(7, on_device=False))
    assert bytes(region.payload) == b"payload"
    region.release()
    for each in (sender, receiver, sending, receiving):
        await each.aclose()


async def test_auto_goes_on_without_a_transport_that_does_not_start(monkeypatch):
    async def broken(options: TransportOptions):
        raise OSError("no such device")

    tcp = registry.get("tcp")
    monkeypatch.setattr(registry, "candidates", lambda name: (TransportInfo("ucx", broken), tcp))
    found = await Transports.start(settings(DecodeSettings), CPU)
    assert found.names == ["tcp"]
    await found.aclose()
    monkeypatch.setattr(registry, "candidates", lambda name: (tcp, TransportInfo("last", broken)))
    with pytest.raises(OSError, match="no such device"):
        await Transports.start(settings(DecodeSettings), CPU)


async def test_a_transport_that_cannot_encrypt_is_no_choice_beside_tls(plugged):
    with pytest.raises(ConfigError, match="--transport near sends KV unencrypted"):
        await Transports.start(settings(DecodeSettings, transport="near", tls_cert="cert.pem"), CPU)
