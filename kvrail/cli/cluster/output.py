"""Where `kvrail up` writes: its own words and its children's log lines, one line at a time."""

import os
from time import monotonic
from typing import TextIO

COLORS = ("36", "32", "33", "35", "34", "96", "92", "93", "95", "94")
RESET, BOLD = "\x1b[0m", "\x1b[1m"


class Output:
    """Lines with the name of the process that wrote them, coloured on a terminal unless NO_COLOR is set."""

    def __init__(self, stream: TextIO, *, prefix: bool) -> None:
        """prefix: whether each line begins with its process's name; JSON lines carry it themselves."""
        self._stream = stream
        self._prefix = prefix
        self._colored = stream.isatty() and not os.environ.get("NO_COLOR")
        self._colors: dict[str, str] = {}
        self._unwritten = 0  # lines
        self._last = monotonic()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last line."""
        return monotonic() - self._last

    def line(self, name: str, text: str) -> None:
        """Write one line of the process `name`."""
        if not self._prefix:
            self._write(text)
            return
        color = self._colors.setdefault(name, COLORS[len(self._colors) % len(COLORS)])
        head = f"{name:<10}|"
        self._write(f"\x1b[{color}m{head}{RESET} {text}" if self._colored else f"{head} {text}")

    def say(self, text: str) -> None:
        """Write words of `kvrail up` itself."""
        self._write(f"{BOLD}{text}{RESET}" if self._colored else text)

    def _write(self, text: str) -> None:
        """Write a line. A full disk must not end the cluster: the next line that can be written counts the lost ones.

        Raises BrokenPipeError where the reader has gone.
        """
        self._last = monotonic()
        encoding = self._stream.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)  # children write UTF-8
        try:
            if self._unwritten:
                self._stream.write(f"the output took no lines for a while; up to {self._unwritten} are missing here\n")
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            self._unwritten += 1
        else:
            self._unwritten = 0
