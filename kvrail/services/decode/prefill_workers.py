"""Prefill workers: which may be asked, and channels to them."""

import asyncio
import ipaddress
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvrail.rpc.channel import open_channel
from kvrail.rpc.names import Name
from kvrail.rpc.prefill.client import GrpcPrefillClient
from kvrail.runtime.breaker import Breaker
from kvrail.security.tls import Tls
from kvrail.transfer.peers import Recent

logger = logging.getLogger("kvrail.decode")


RESOLVED_EVERY_S = 5.0
"""Names of the allow-list are resolved again for a request that comes this long after the last time."""
RESOLVING_S = 2.0
"""A request waits this long for that; then the last answers count."""


class AllowedWorkers:
    """The prefill workers that a request may name: a client of this port must not choose where it connects to.

    rules: hosts, host:port, or networks such as 10.0.0.0/8; none: any worker. A host stands for itself and for all
    addresses that it resolves to; while it does not resolve, for the last ones.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._written: set[str] = set()
        self._names: list[tuple[Name, str]] = []  # with the port that it allows; empty: any
        self._looked_at = float("-inf")
        self._looking: asyncio.Future[Any] | None = None
        for rule in rules:
            try:
                self._networks.append(ipaddress.ip_network(rule, strict=False))
            except ValueError:
                self._add_name(rule)

    def _add_name(self, rule: str) -> None:
        self._written.add(rule)
        host, _, port = rule.rpartition(":") if ":" in rule else (rule, "", "")
        if not _is_address(host.strip("[]")):
            self._names.append((Name(host, int(port) if port.isdecimal() else 0), port))

    async def of(self, addresses: Sequence[str]) -> list[str]:
        """Those of `addresses`, host:port each, that may be asked; the others are logged."""
        if not (self._networks or self._written):
            return list(addresses)
        if not all(self._permits_as_written(address) for address in addresses):
            await self._resolve()
        allowed = [address for address in addresses if self._permits(address)]
        if len(allowed) < len(addresses):
            refused = ", ".join(sorted(set(addresses) - set(allowed)))
            logger.warning("not asking %s: --allowed-prefill-workers does not name it", refused)
        return allowed

    async def _resolve(self) -> None:
        """Have the names' addresses of now, or the last ones where that takes too long."""
        if self._names and self._looking is None and monotonic() - self._looked_at >= RESOLVED_EVERY_S:
            self._looking = asyncio.gather(*(name.look() for name, _ in self._names))
            self._looking.add_done_callback(self._looked)
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=RESOLVING_S)

    def _looked(self, looking: "asyncio.Future[Any]") -> None:
        self._looking, self._looked_at = None, monotonic()
        for name, _ in self._names if not looking.cancelled() else ():
            if name.failure:
                logger.warning("--allowed-prefill-workers: %s %s", name.host, name.failure)

    def _permits(self, address: str) -> bool:
        host, _, port = address.rpartition(":")
        return self._permits_as_written(address) or any(
            only in ("", port) and host in {each.rpartition(":")[0] for each in name.addresses}
            for name, only in self._names
        )

    def _permits_as_written(self, address: str) -> bool:
        host = address.rpartition(":")[0].strip("[]")
        if address in self._written or host in self._written:
            return True
        return _is_address(host) and any(ipaddress.ip_address(host) in network for network in self._networks)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """A prefill worker that a request names: host:port, and which start of its process the router knows; 0: none."""

    address: str
    instance: int = 0


class Breakers(Recent[PrefillTarget, Breaker]):
    """A breaker for each prefill worker, and a new one for each start of its process."""

    def of(self, worker: PrefillTarget) -> Breaker:
        """The breaker of this start of the worker."""
        breaker = self[worker] = self.get(worker) or Breaker()
        return breaker


class GrpcPrefillWorkers:
    """Opens a channel to a prefill worker when it is first asked for, and keeps it and its client while it is used."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._clients: Recent[str, GrpcPrefillClient] = Recent(self._close, math.inf)  # its calls may last
        self._closing: set[asyncio.Task[None]] = set()

    def client(self, address: str) -> GrpcPrefillClient:
        """A client of the worker at `address`, host:port."""
        client = self._clients.get(address)
        if client is None:
            client = GrpcPrefillClient(open_channel(address, tls=self._tls, role="prefill"), address)
        self._clients[address] = client
        return client

    def _close(self, address: str, client: GrpcPrefillClient) -> None:
        task = asyncio.ensure_future(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels."""
        for client in self._clients.values():
            await client.close()
        await asyncio.gather(*self._closing)
