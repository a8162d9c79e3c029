"""Parts of the transport that need no UCX: addresses, tags, settings, why it cannot start, retired buffers, sender."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import uuid
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrail.config.settings import PrefillSettings
from kvrail.errors import ConfigError, IncompatibleError, TransferAbortedError
from kvrail.transport.base import MAX_ADDRESS_BYTES
from kvrail.transport.regions import RegionPool, host_pool
from kvrail.transport.registry import TransportOptions
from kvrail.transport.ucx import TRANSPORT, UcxSettings, UcxTransport, available, library, network
from kvrail.transport.ucx.address import UcxAddress
from kvrail.transport.ucx.network import device_of
from kvrail.transport.ucx.retired import RetiredBuffers
from kvrail.transport.ucx.sender import UcxSender
from kvrail.transport.ucx.tags import DIRECTION_MASK, PAYLOADS, Kind, shorten, tag
from kvrail.worker import transports


@given(st.binary(min_size=1, max_size=2000), st.none() | st.uuids())
def test_an_address_comes_back(worker, device):
    address = UcxAddress(worker, device)
    assert UcxAddress.unpack(address.pack()) == address


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_damaged_address_is_refused(worker, data):
    packed = bytearray(UcxAddress(worker, uuid.UUID(int=5)).pack())
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IncompatibleError):
        UcxAddress.unpack(bytes(packed))


@given(st.binary(max_size=100))
def test_what_is_no_address_is_refused(packed):
    with pytest.raises(IncompatibleError):
        UcxAddress.unpack(packed)


def test_an_address_of_another_version_is_refused_by_number():
    packed = bytearray(UcxAddress(b"worker").pack())
    packed[4] -= 1
    head, begin = bytes(packed[:22]), 26
    packed[22:begin] = zlib.crc32(head + packed[begin:]).to_bytes(4, "little")
    with pytest.raises(IncompatibleError, match=f"version {packed[4]}, this end reads {packed[4] + 1}; update both"):
        UcxAddress.unpack(bytes(packed))


def test_an_address_that_is_too_long_is_refused():
    with pytest.raises(IncompatibleError, match="UCX_NET_DEVICES"):
        UcxAddress(bytes(MAX_ADDRESS_BYTES)).pack()


keys = st.integers(0, (1 << 64) - 1)


@given(keys, st.sampled_from(Kind), st.integers(0, PAYLOADS - 1))
def test_tags_have_64_bits_and_tell_direction(key, kind, number):
    made = tag(key, kind, number)
    assert 0 <= made < 1 << 64
    to_sender = kind in (Kind.ACK, Kind.STOP, Kind.HELLO)
    assert (made & DIRECTION_MASK == tag(key, Kind.ACK) & DIRECTION_MASK) == to_sender
    assert (made & DIRECTION_MASK == tag(key, Kind.BODY) & DIRECTION_MASK) == (not to_sender)


@given(keys, st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, PAYLOADS - 1)), unique=True))
def test_tags_of_an_attempt_differ(key, messages):
    assert len({tag(key, *message) for message in messages}) == len(messages)


def test_keys_that_follow_each_other_differ_in_their_tags():
    assert len({shorten(key) for key in range(10_000)}) == 10_000


def test_the_environment_overrules_settings(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "all")
    config = UcxSettings(extra={"NET_DEVICES": "lo"}).config(on_device=False)
    assert "TLS" not in config
    assert config["NET_DEVICES"] == "lo"
    monkeypatch.delenv("UCX_TLS")
    assert device_of("127.0.0.1") == device_of("localhost") == "lo"
    with pytest.raises(ConfigError, match=r"--ucx-host 192.0.2.1 is 192.0.2.1, but this machine has 127.0.0.1 \(lo\)"):
        device_of("192.0.2.1")
    with pytest.raises(ConfigError, match=r"--ucx-host nobody.invalid: .*; name an address of this machine"):
        device_of("nobody.invalid")
    assert UcxSettings().config(on_device=True)["TLS"] == "tcp,cma,self,cuda_copy,cuda_ipc"


def test_rdma_is_taken_where_there_are_devices_and_a_ucx_that_knows_them(monkeypatch, tmp_path):
    for name, net in (("mlx5_0", "lo"), ("mlx5_1", "eth7"), ("ib0", "")):  # RoCE on two networks, InfiniBand without IP
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        if net:
            (tmp_path / name / "device" / "net" / net).mkdir(parents=True)
    monkeypatch.setattr(network, "RDMA", tmp_path)
    assert network.rdma_ports() == ["ib0:1", "mlx5_0:1", "mlx5_1:1"]
    assert network.devices_of("127.0.0.1") == "lo,ib0:1,mlx5_0:1"
    config = UcxSettings(rdma=True).config(on_device=True)
    assert config["TLS"] == "rc,ud,tcp,cma,self,cuda_copy,cuda_ipc"


@pytest.mark.parametrize(("system", "rdma"), [("true", True), ("false", False)])
async def test_the_wheels_ucx_is_not_asked_for_rdma(monkeypatch, tmp_path, system, rdma):
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr(network, "RDMA", tmp_path)
    monkeypatch.setenv(library.PREFER_SYSTEM, system)
    found = []

    async def start(**options):
        found.append(options["settings"])

    monkeypatch.setattr(UcxTransport, "start", start)
    await TRANSPORT.start(TransportOptions(torch.device("cpu"), pool=host_pool(4096), ucx_host="127.0.0.1"))
    (settings,) = found
    assert settings.rdma == rdma
    assert settings.extra == {"NET_DEVICES": "lo,mlx5_0:1" if rdma else "lo"}


def test_a_system_without_ucx_is_not_served_by_the_wheels():
    """UCXX's loader falls back to the wheel's without a word."""
    if why := available():
        pytest.skip(why)
    code = "from kvrail.transport.ucx import available; print(available())"
    environment = os.environ | {library.PREFER_SYSTEM: "true"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if "libucp" in done.stdout:
        assert "asks for the system's UCX, but" in done.stdout and "LD_LIBRARY_PATH" in done.stdout


@pytest.fixture
def absent(monkeypatch):
    """Make packages seem not to be installed."""
    found = importlib.util.find_spec
    library.load.cache_clear()

    def hide(*names):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else found(name))

    yield hide
    library.load.cache_clear()


async def test_without_ucxx_the_start_says_what_to_install(absent):
    absent("ucxx")
    with pytest.raises(ConfigError, match=r"kvrail\[ucx\]"):
        await UcxTransport.start(pool=host_pool(1 << 20))
    assert "kvrail[ucx]" in available()


@pytest.mark.parametrize("missing", ["librmm", "libucx"])
def test_half_an_installation_is_refused(absent, missing, monkeypatch):
    if importlib.util.find_spec("ucxx") is None:
        pytest.skip("UCXX is not installed")
    monkeypatch.delenv(library.PREFER_SYSTEM, raising=False)
    absent(missing)
    assert missing in available()


def test_loading_leaves_the_environment_alone():
    if why := available():
        pytest.skip(why)
    assert not {name for name in os.environ if name.startswith("UCX_")} - {"UCX_HANDLE_ERRORS"}


async def test_the_retired_keeps_a_region_until_ucx_lets_go(caplog):
    pool = RegionPool(torch.zeros(8192, dtype=torch.uint8))
    retired = RetiredBuffers(limit_bytes=1000)
    let_go = asyncio.Event()
    pending = {asyncio.ensure_future(_ended(let_go)), asyncio.ensure_future(_ended(let_go))}
    retired.keep(await pool.take(3000), pending)
    assert retired.held_bytes == 3000
    assert pool.free_bytes == 4096
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    let_go.set()
    await asyncio.wait(pending)
    await asyncio.sleep(0)
    assert retired.held_bytes == 0
    assert pool.free_bytes == 8192


async def _ended(event):
    await event.wait()


class Messages:
    """An attempt without UCX: each message is a future that the test ends."""

    def __init__(self):
        self.endpoint = SimpleNamespace(alive=True)
        self.made = {}

    def send(self, buffer, kind, number=0):
        return self.made.setdefault(kind, asyncio.get_running_loop().create_future())

    receive = send


@pytest.mark.parametrize(("size", "came"), [(1000, Kind.ACK), (1000, None), (1 << 20, None)])
async def test_a_receiver_that_ends_in_the_same_moment_has_a_payload_only_if_it_said_so(size, came):
    attempt = Messages()
    payload_sender = UcxSender(attempt, on_device=False, silence_s=60)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(size))))
    await asyncio.sleep(0)
    for kind in (Kind.BODY, Kind.STOP, *([came] if came else [])):
        attempt.made[kind].set_result(None)
    if came:
        await sending
    else:
        with pytest.raises(TransferAbortedError, match="gone"):
            await sending


async def test_a_long_payload_is_sent_once_it_is_read_and_its_size_has_left():
    attempt = Messages()
    payload_sender = UcxSender(attempt, on_device=False, silence_s=60)
    sending = asyncio.create_task(payload_sender.send(memoryview(bytes(1 << 20))))
    await asyncio.sleep(0)
    assert Kind.SIZE not in attempt.made and not sending.done()
    attempt.made[Kind.BODY].set_result(None)
    await sending
    assert set(attempt.made) == {Kind.STOP, Kind.BODY, Kind.SIZE}


@pytest.mark.parametrize(
    ("device", "cores", "polls"),
    [("cuda", 8, True), ("cuda", 7, False), ("cpu", 64, False)],
)
async def test_workers_poll_on_a_gpu_with_cores_to_spare(monkeypatch, device, cores, polls):
    spins = []

    async def start(**options):
        spins.append(options["settings"].spin)

    monkeypatch.setattr(UcxTransport, "start", start)
    monkeypatch.setattr(transports, "usable_cores", lambda: cores)
    settings = PrefillSettings(transport="ucx")
    await TRANSPORT.start(replace(transports._options(settings, torch.device(device)), pool=host_pool(4096)))
    assert spins == [polls]
