"""Discovery of workers: those that the settings name, and the current addresses of DNS names."""

import asyncio
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from kvrail.config.types import DNS
from kvrail.rpc.names import Name

log = logging.getLogger("kvrail.router.workers")

INTERVAL_S = 2.0
"""Between two looks at a name written dns+host:port; resolvers cache their answers for longer."""


class Discovery:
    """The workers of one role. Belongs to one event loop.

    written: host:port each, or dns+host:port for all addresses of that name. on_news: called after each look
    at a name.
    """

    def __init__(self, role: str, written: Iterable[str], on_news: Callable[[], object]) -> None:
        self.role = role
        self._on_news = on_news
        self._names: dict[str, Name] = {}
        self.fixed: list[str] = []
        for each in written:
            if each.startswith(DNS):
                host, _, port = each.removeprefix(DNS).rpartition(":")
                self._names[each] = Name(host.strip("[]"), int(port))
            else:
                self.fixed.append(each)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def targets(self) -> Sequence[str]:
        """Where workers are, host:port each: those of the settings first, then those of names, sorted."""
        named = sorted({address for name in self._names.values() for address in name.addresses})
        return list(dict.fromkeys([*self.fixed, *named]))

    @property
    def found(self) -> bool:
        """Whether every name has resolved at least once."""
        return all(name.found for name in self._names.values())

    @property
    def failures(self) -> dict[str, str]:
        """Why names do not resolve now, by name as written in the settings."""
        return {written: name.failure for written, name in self._names.items() if name.failure}

    def forget(self, targets: Container[str]) -> None:
        """Drop these addresses if they came from names that no longer resolve."""
        for name in self._names.values():
            name.forget(targets)

    def describe(self) -> dict[str, Any]:
        """The names' entries in /health, as they are written in the settings."""
        return {
            written: {"addresses": list(name.addresses)} | ({"detail": name.failure} if name.failure else {})
            for written, name in self._names.items()
        }

    def start(self) -> None:
        """Begin to look names up."""
        self._tasks = [
            asyncio.create_task(self._follow(written, name), name=f"resolve {written}")
            for written, name in self._names.items()
        ]

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, written: str, name: Name) -> None:
        while True:
            before, failure = name.addresses, name.failure
            await name.look()
            if name.failure and name.failure != failure:
                kept = f"; its {len(before)} workers are kept while they answer" if before else ""
                log.warning("%s workers %s: the name %s%s", self.role, written, name.failure, kept)
            if name.addresses != before:
                log.info("%s workers %s are %s", self.role, written, ", ".join(name.addresses))
            try:
                self._on_news()
            except Exception:
                log.exception("%s workers %s: what the name says could not be used", self.role, written)
            await asyncio.sleep(INTERVAL_S)
