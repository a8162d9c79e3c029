"""A wall clock that a test sets, for processes that it starts: libfaketime. Clocks that only count seconds go on."""

import os
import platform
from pathlib import Path

import pytest

LIBRARY = Path(os.environ.get("LIBFAKETIME", f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketimeMT.so.1"))
HOUR = 3600


class WallClock:
    """Skips the test where libfaketime is not installed; in CI it fails."""

    def __init__(self, folder: Path) -> None:
        if not LIBRARY.exists():
            assert not os.environ.get("CI"), f"{LIBRARY} is missing; install libfaketime or set LIBFAKETIME"
            pytest.skip("libfaketime is not installed")
        self._file = folder / "clock"
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to see this clock. It makes all that asks for the time several times slower."""
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds after which the file is read again
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",  # processes need not agree but by the file
        }

    def set(self, seconds: int) -> None:
        """Stand so many seconds from the true time; processes see it a second later at most."""
        unfinished = self._file.with_suffix(".new")
        unfinished.write_text(f"{seconds:+d}")
        unfinished.replace(self._file)
