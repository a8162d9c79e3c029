"""Who asks: what separates one client's requests from another's, for turns and for room. Never the key itself."""

import ipaddress

from starlette.types import Scope

UNKNOWN = "unknown"
"""Whoever comes by a way that has no addresses."""


def client_of(scope: Scope, key: int | str | None) -> str:
    """A name for the client of a request: its API key's place or name, or its address; of IPv6 the network of 64 bits.

    key: None where the request has none of the server's keys; what a client sends beside is its own invention.
    """
    if key is not None:
        return f"key-{key}" if isinstance(key, int) else f"key:{key}"
    host = unmapped((scope.get("client") or (UNKNOWN,))[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)


def unmapped(host: str) -> str:
    """The IPv4 address that an IPv6 one such as ::ffff:192.0.2.1 stands for; any other host as it is.

    A socket that takes both shows IPv4 clients so.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(getattr(address, "ipv4_mapped", None) or host)
