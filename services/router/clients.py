"""Who asks: what tells one client's requests from another's in the queue. Never the key itself."""

import hashlib
import ipaddress

from starlette.datastructures import Headers
from starlette.types import Scope

UNKNOWN = "unknown"
"""Whoever comes by a way that has no addresses."""


def client_of(scope: Scope, *, by_key: bool) -> str:
    """A name for the client of a request: a digest of its API key, or its address; of IPv6 the network of 64 bits.

    by_key: whether keys are asked for here; else what a client sends as its key is its own invention.
    """
    if by_key:
        headers = Headers(scope=scope)
        given = headers.get("authorization", "").partition(" ")[2].strip() or headers.get("x-api-key", "")
        return f"key-{hashlib.blake2b(given.encode(), digest_size=8).hexdigest()}"
    host = (scope.get("client") or (UNKNOWN,))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return str(host)
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else str(address)
