"""Stop strings in a stream of text."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may go to the client, and the stop string that ended it, if one did."""

    text_to_emit: str
    matched: str | None = None


class StopMatcher:
    """Finds the earliest stop string in text that arrives in pieces.

    Holds back only the longest suffix that may still become a stop string. Of several matches the one that begins first
    wins; of those that begin together, the shortest, which ends first. The match and the emitted text do not depend on
    how the text is cut into pieces.

    stop: non-empty strings. include_stop: whether the stop string itself is emitted.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._stop = tuple(sorted(set(stop), key=len))
        if "" in self._stop:
            raise ValueError("stop strings must not be empty; leave '' out")
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> StopResult:
        """Take the next piece of text. After a match, push nothing more."""
        if not self._stop:
            return StopResult(text)
        window = self._held + text
        match = self._earliest(window)
        hold_from = self._hold_from(window)
        if match is not None and match[0] <= hold_from:
            self._held = ""
            return self._cut(window, *match)
        # A match that begins behind a stop string still in the making waits for it: the earlier one may complete.
        self._held = window[hold_from:]
        return StopResult(window[:hold_from])

    def flush(self) -> StopResult:
        """End the text: what was held back is emitted, or cut at the first match in it."""
        window, self._held = self._held, ""
        match = self._earliest(window)
        return StopResult(window) if match is None else self._cut(window, *match)

    def _cut(self, window: str, begin: int, stop: str) -> StopResult:
        return StopResult(window[: begin + len(stop)] if self._include_stop else window[:begin], stop)

    def _earliest(self, window: str) -> tuple[int, str] | None:
        """Start and string of the match that begins first; the shortest of those that begin together."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            begin = window.find(stop)
            if begin >= 0 and (found is None or begin < found[0]):
                found = begin, stop
        return found

    def _hold_from(self, window: str) -> int:
        """Start of the longest suffix of `window` that is a proper prefix of a stop string; its length if none is."""
        longest = max(len(stop) for stop in self._stop) - 1
        for begin in range(max(0, len(window) - longest), len(window)):
            suffix = window[begin:]
            if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stop):
                return begin
        return len(window)
