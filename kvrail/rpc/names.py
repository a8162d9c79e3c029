"""DNS names with several addresses, which change while a process runs."""

import asyncio
import socket
from collections.abc import Container, Sequence

from kvrail.errors import reason_of


async def resolve(host: str, port: int) -> Sequence[str]:
    """All addresses of `host` (A and AAAA records), host:port each, sorted; raises OSError where it has none.

    This may take as long as the system's resolver does: tens of seconds where no name server answers.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({_written(str(entry[4][0]), port) for entry in found})


def _written(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class Name:
    """A DNS name, and the addresses that it had when it was last resolved.

    addresses: host:port each; those of the last answer stay while there is none. failure: why the last look came to
    nothing; empty where it did not. found: whether any look ever came to something.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.addresses: tuple[str, ...] = ()
        self.failure = "has not been resolved yet"
        self.found = False

    async def look(self) -> None:
        """Resolve the name again."""
        try:
            self.addresses = tuple(await resolve(self.host, self.port))
        except OSError as error:
            self.failure = f"does not resolve: {error.strerror or reason_of(error)}"
        except UnicodeError as error:  # what the codec idna makes of labels that are too long
            self.failure = f"is no DNS name: {error}"
        else:
            self.failure, self.found = "", True

    def forget(self, addresses: Container[str]) -> None:
        """Drop these addresses if they were only kept because the name does not resolve."""
        if self.failure:
            self.addresses = tuple(each for each in self.addresses if each not in addresses)
