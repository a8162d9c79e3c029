"""Transports by name: those of this package, and those that other packages plug in.

A package plugs one in by an entry point of the group `kvrail.transports`, which names a `TransportInfo`:

    [project.entry-points."kvrail.transports"]
    rdma = "my_package.transport:TRANSPORT"

Workers then use it with `--transport rdma`. A transport's module is imported when it is asked for, not before.
"""

import asyncio
import importlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

from kvrail.errors import ConfigError, KvrailError, reason_of
from kvrail.transport.base import Transport
from kvrail.transport.regions import RegionPool

logger = logging.getLogger("kvrail.transports")

GROUP = "kvrail.transports"
AUTO = "auto"
"""In place of a name: every transport of this package that can start, the best first."""

_OWN = {"ucx": "kvrail.transport.ucx", "tcp": "kvrail.transport.tcp"}  # the best first


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What one end of a transport is started with.

    device: where this end's pages lie. pool: host memory to receive into, pinned beside a GPU; None: this end only
    sends. host, port: where an end that sends may listen, at any free port for 0; an end without a host only receives.
    encrypt: payloads are encrypted, if the transport can. silence_s: seconds without any progress after which the other
    end counts as lost. poll: spend a core on polling, if the transport can. ucx_host: an address of this machine on the
    one network that UCX may use; "": all of them.
    """

    device: torch.device
    pool: RegionPool | None = None
    host: str = ""
    port: int = 0
    encrypt: bool = False
    silence_s: float = 60.0
    poll: bool = False
    ucx_host: str = ""


@dataclass(frozen=True, slots=True)
class TransportInfo:
    """One transport: how to start an end, why that is impossible here ("" if it is not), whether it encrypts."""

    name: str
    start: Callable[[TransportOptions], Awaitable[Transport]]
    obstacle: Callable[[], str] = lambda: ""
    encrypts: bool = False


def names() -> tuple[str, ...]:
    """Names of all transports, this package's first."""
    return (*_OWN, *sorted(entry_points(group=GROUP).names - _OWN.keys()))


def get(name: str) -> TransportInfo:
    """The transport called `name`. Raises ConfigError if there is none, or if its module does not load."""
    if name in _OWN:
        info = importlib.import_module(_OWN[name]).TRANSPORT
    elif plugs := tuple(entry_points(group=GROUP, name=name)):
        try:
            info = plugs[0].load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"transport {name!r} does not load: {error}; repair the package that offers it"
            ) from error
    else:
        raise ConfigError(f"transport {name!r} is unknown; choose one of {', '.join((AUTO, *names()))}")
    if not isinstance(info, TransportInfo) or info.name != name:
        raise ConfigError(f"transport {name!r} is offered as {info!r}, which is no TransportInfo of that name")
    return info


def candidates(name: str) -> tuple[TransportInfo, ...]:
    """The transports that a setting stands for, the best first. Raises ConfigError as `get`."""
    return tuple(map(get, _OWN)) if name == AUTO else (get(name),)


async def start(
    name: str, options: TransportOptions, refusal: Callable[[TransportInfo], str] = lambda info: ""
) -> tuple[list[Transport], list[str]]:
    """Start the transports that a name stands for, the best first; returns also why others are left out.

    refusal: why the caller does without one of those that AUTO stands for, "" if it does not. Raises ConfigError as
    `get`, and whatever the last transport raises if it does not start.
    """
    infos, started, obstacles = candidates(name), list[Transport](), list[str]()
    try:
        for info in infos:
            if obstacle := refusal(info) or (info.obstacle() if name == AUTO else ""):
                obstacles.append(f"not by {info.name}: {obstacle}")
                continue
            try:
                started.append(await info.start(options))
            except (KvrailError, RuntimeError, OSError) as error:
                if info is infos[-1]:  # the others have been tried
                    raise
                logger.warning("transport %s does not start: %s", info.name, reason_of(error))
                obstacles.append(f"not by {info.name}: {reason_of(error)}")
    except BaseException:
        await asyncio.gather(*(transport.aclose() for transport in started))
        raise
    return started, obstacles
