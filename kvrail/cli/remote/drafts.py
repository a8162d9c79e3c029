"""Drafts on a terminal: dimmed behind the answer, solid once they are confirmed, erased where they are withdrawn."""

import os
import shutil
from typing import Any, TextIO

from rich.cells import cell_len

TAB = 8
DIM, RESET, CLEAR_BELOW = "\x1b[2m", "\x1b[0m", "\x1b[J"


def shows_drafts(stream: TextIO) -> bool:
    """Whether drafts can be shown: on a terminal that understands escape sequences, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class DraftScreen:
    """Writes an answer with its drafts behind it.

    On the screen stand the text that is certain, then drafts that were confirmed and whose text has not come yet, then
    the others, dimmed. Certain text that comes takes the place of what was confirmed. Beyond `rows` - 1 rows drafts
    are not shown: what scrolls away cannot be erased.
    """

    def __init__(self, out: TextIO, size: os.terminal_size | None = None) -> None:
        """size: of the terminal; asked for where it is not given."""
        self._out = out
        size = size or shutil.get_terminal_size()
        self._columns, self._rows = max(size.columns, 1), size.lines
        self._row = ""  # certain text on the row where it ends
        self._confirmed = ""
        self._drafts: list[tuple[int, int, str]] = []  # position, tokens, text
        self._below = 0  # rows that drafts take under the row where certain text ends
        self._shown = False

    def write(self, text: str) -> None:
        """Certain text has come."""
        if self._confirmed.startswith(text):
            self._confirmed = self._confirmed.removeprefix(text)
        else:  # other text than was drafted, or less: a stop string cut it
            self._confirmed = ""
        self._erase()
        self._out.write(text)
        self._row = self._wrapped(self._row, text)[-1]
        self._show()

    def news(self, member: dict[str, Any]) -> None:
        """Take the member `kvrail` of a chunk: drafts, or what became of them."""
        if drafted := member.get("provisional"):
            begin = drafted["position"]
            self._drafts = [draft for draft in self._drafts if draft[0] < begin]
            self._drafts.append((begin, drafted["tokens"], drafted["text"]))
        if confirmed := member.get("confirm"):
            end = confirmed["position"] + confirmed["tokens"]
            self._confirmed += "".join(text for begin, count, text in self._drafts if begin + count <= end)
            self._drafts = [draft for draft in self._drafts if draft[0] + draft[1] > end]
        if retracted := member.get("retract"):
            self._drafts = [draft for draft in self._drafts if draft[0] + draft[1] <= retracted["position"]]
        self._erase()
        self._show()

    def close(self) -> None:
        """The answer is over: erase what is not certain."""
        self._confirmed, self._drafts = "", []
        self._erase()

    def _wrapped(self, row: str, text: str) -> list[str]:
        """Rows of the screen that `text` fills after `row`; the first one begins with `row`."""
        rows = [row]
        for character in text:
            if character == "\n":
                rows.append("")
            elif character == "\t":
                rows[-1] = rows[-1].ljust(min(len(rows[-1]) + TAB - cell_len(rows[-1]) % TAB, self._columns))
            elif cell_len(rows[-1]) + cell_len(character) > self._columns:
                rows.append(character)
            else:
                rows[-1] += character
        return rows

    def _show(self) -> None:
        drafts = "".join(text for _, _, text in self._drafts)
        below = len(self._wrapped(self._row, self._confirmed + drafts)) - 1
        if (self._confirmed or drafts) and below < self._rows - 1:
            self._out.write(self._confirmed + (f"{DIM}{drafts}{RESET}" if drafts else ""))
            self._below, self._shown = below, True
        self._out.flush()

    def _erase(self) -> None:
        """Go back to the end of the certain text; its last row is written again, since it may be full."""
        if self._shown:
            up = f"\x1b[{self._below}A" if self._below else ""
            self._out.write(f"{up}\r{CLEAR_BELOW}{self._row}")
            self._shown = False
