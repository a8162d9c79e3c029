"""Which of this machine's networks UCX is to use."""

import fcntl
import socket
import struct

from kvrail.errors import ConfigError

_SIOCGIFADDR = 0x8915


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
