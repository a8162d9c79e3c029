"""How much memory pages may have on a CPU, whose memory is taken as they are written: too late to say that it lacks."""

import contextlib
import os
from pathlib import Path

from kvrail.config.settings import WorkerSettings
from kvrail.errors import ConfigError

GROUP_LIMITS = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"  # of control groups 2 and 1


def check_page_memory(settings: WorkerSettings, name: str) -> None:
    """Raise ConfigError where kv_memory_gib, given as `name`, is more than all memory of the host or the container."""
    if settings.device == "cpu" and (asked := settings.kv_memory_gib) > (most := host_memory() / (1 << 30)):
        raise ConfigError(f"{name}: {asked:g} GiB for pages are more than all memory here, {most:.3g} GiB; name fewer")


def host_memory() -> int:
    """Bytes of memory that this process may have: the machine's, or a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such group, or `max`
            limits.append(int(Path(path).read_text()))
    return min(limits)
