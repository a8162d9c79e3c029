"""Which of this machine's networks UCX is to use."""

import fcntl
import socket
import struct
from pathlib import Path

from kvrail.errors import ConfigError

RDMA = Path("/sys/class/infiniband")
_SIOCGIFADDR = 0x8915


def rdma_ports() -> list[str]:
    """RDMA devices of this machine, as UCX names them: device and port, such as mlx5_0:1."""
    return [f"{port.parents[1].name}:{port.name}" for port in sorted(RDMA.glob("*/ports/*"))]


def devices_of(host: str) -> str:
    """UCX's setting of its network devices: that of `host` and, where RDMA is used, the RDMA devices on it.

    An RDMA device that has no network device of its own, as InfiniBand without IP, is taken too. Raises ConfigError as
    `device_of`.
    """
    name = device_of(host)
    owners = {port: RDMA / port.partition(":")[0] / "device" / "net" for port in rdma_ports()}
    return ",".join([name, *(port for port, nets in owners.items() if not nets.is_dir() or (nets / name).exists())])


def device_of(host: str) -> str:
    """The network device that has an IPv4 address of `host`, a name or an address. Raises ConfigError if none has.

    A name may have further addresses, of other machines.
    """
    try:
        wanted = {found[4][0] for found in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"--ucx-host {host}: {error}; name an address of this machine, or leave it out") from None
    here = {name: address for _, name in socket.if_nameindex() if (address := _address(name))}
    for name, address in here.items():
        if address in wanted:
            return name
    known = ", ".join(f"{address} ({name})" for name, address in here.items())
    raise ConfigError(
        f"--ucx-host {host} is {', '.join(sorted(map(str, wanted)))}, but this machine has {known}; name one of these"
    )


def _address(name: str) -> str:
    """A device's first IPv4 address, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
