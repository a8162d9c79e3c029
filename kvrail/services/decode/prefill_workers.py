"""Prefill workers: which may be asked, and channels to them."""

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc.aio

from kvrail.breaker import Breaker
from kvrail.rpc.channel import open_channel
from kvrail.rpc.prefill import GrpcPrefillClient
from kvrail.tls import Tls

logger = logging.getLogger("kvrail.decode")


class AllowedWorkers:
    """The prefill workers that a request may name: who reaches this port must not choose where it connects to.

    rules: hosts, host:port, or networks such as 10.0.0.0/8, which hold addresses only, no names; none: any worker.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set()
        for rule in rules:
            try:
                self._networks.append(ipaddress.ip_network(rule, strict=False))
            except ValueError:
                self._names.add(rule)

    def of(self, addresses: Sequence[str]) -> list[str]:
        """Those of `addresses`, host:port each, that may be asked; the others are logged."""
        allowed = [address for address in addresses if self._permits(address)]
        if len(allowed) < len(addresses):
            refused = ", ".join(sorted(set(addresses) - set(allowed)))
            logger.warning("not asking %s: --allowed-prefill-workers does not name it", refused)
        return allowed

    def _permits(self, address: str) -> bool:
        if not (self._networks or self._names):
            return True
        host = address.rpartition(":")[0].strip("[]")
        if address in self._names or host in self._names:
            return True
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(number in network for network in self._networks)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prefill worker that a request names: host:port, and which start of its process the router knows; 0: none."""

    address: str
    instance: int = 0


class Breakers:
    """What came of asking each prefill worker; one that is started anew owes nothing."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Breaker]] = {}

    def of(self, worker: Asked) -> Breaker:
        """The breaker of this start of the worker."""
        instance, breaker = self._known.get(worker.address, (worker.instance, None))
        if breaker is None or instance != worker.instance:
            breaker = Breaker()
            self._known[worker.address] = worker.instance, breaker
        return breaker


class GrpcPrefillWorkers:
    """Opens a channel to a prefill worker when it is first asked for, and keeps it."""

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    def client(self, address: str) -> GrpcPrefillClient:
        """A client of the worker at `address`, host:port."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, tls=self._tls, role="prefill")
        return GrpcPrefillClient(self._channels[address], address)

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close()
