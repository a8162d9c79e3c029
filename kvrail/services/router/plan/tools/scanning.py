"""One call of a tool, written as JSON, read as its characters come."""

import json
from enum import Enum, auto

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
KEYS = frozenset({NAME, *ARGUMENTS, "id", "type"})
"""Keys of a call; an object with others is none."""
_SPACE = " \t\r\n"


class _At(Enum):
    START = auto()  # before the object
    KEY = auto()  # before a key
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()


class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`, or `parameters`, in any order.

    Arguments are given out as they come once the name is known; before, they are kept. raw: all that was read. A mark
    of the model's form ends a call whose JSON is not complete: its arguments are the text up to there.
    """

    def __init__(self, marks: tuple[str, ...], name: str | None = None) -> None:
        """marks: what opens and closes calls. name: where it stands elsewhere and the object is the arguments."""
        self._marks = marks
        self.name = name
        self.done = self.broken = False
        self.raw = ""
        self._new: list[str] = []  # arguments not given out yet
        self._held = ""  # arguments that wait for the name
        self._any = False
        self._at = _At.START if name is None else _At.VALUE
        self._key = "" if name is None else ARGUMENTS[0]
        self._whole = name is not None  # the value is all there is
        self._token: list[str] = []
        self._depth = 0
        self._string = self._escaped = False
        self._torn = False  # the string has a line's end, so it is no JSON

    @property
    def over(self) -> bool:
        """Whether nothing more is read."""
        return self.done or self.broken

    def push(self, text: str) -> str:
        """Read `text` up to the call's end; returns what is behind it, or from where it is broken."""
        begin, self.raw = len(self.raw), self.raw + text
        for place in range(begin, len(self.raw)):
            if self.over:
                return self._leave(place)
            char = self.raw[place]
            if mark := self._mark_before(place, char):
                self._cut(mark)
                return self._leave(place - len(mark))
            self._step(char)
            if self.broken:
                return self._leave(place)
        return ""

    def end(self) -> None:
        """The output is over: a call that is not complete has the arguments that were read."""
        if not self.over:
            self._cut(self._mark_before(len(self.raw), ""))

    def take(self) -> str:
        """Arguments that have come since the last time; empty before the name is known."""
        if self.name is None:
            return ""
        text, self._held = self._held + "".join(self._new), ""
        kept = 0 if self.over else max(held_back(text, mark) for mark in self._marks)
        text, self._new = text[: len(text) - kept], list(text[len(text) - kept :])
        self._any = self._any or bool(text)
        if self.done and not self._any:
            self._any = True
            return "{}"
        return text

    def _mark_before(self, place: int, char: str) -> str:
        """The mark that ends an incomplete key or value before `place`, where `char` stands; empty where none does.

        Inside a string a mark is text, unless a line's end stands in the string or follows the mark: JSON has none.
        """
        if self._at not in (_At.IN_KEY, _At.IN_VALUE) or (self._string and not self._torn and char >= " "):
            return ""
        return next((mark for mark in self._marks if self.raw.endswith(mark, 0, place)), "")

    def _cut(self, mark: str) -> None:
        """End an incomplete call, behind which `mark` was read."""
        if self._at is not _At.IN_VALUE:
            self.broken = True
            return
        for chars in (self._token, self._new):
            if chars and mark:
                chars[:] = "".join(chars).removesuffix(mark).rstrip()
        self._finish_value()
        self._end()

    def _leave(self, place: int) -> str:
        """Take back what was read from `place` on."""
        rest, self.raw = self.raw[place:], self.raw[:place]
        return rest

    def _step(self, char: str) -> None:
        match self._at:
            case _At.IN_VALUE:
                self._in_value(char)
            case _At.IN_KEY:
                self._in_key(char)
            case _ if char in _SPACE:
                pass
            case _At.START:
                self._expect(char, "{", _At.KEY)
            case _At.COLON:
                self._expect(char, ":", _At.VALUE)
            case _At.VALUE:
                self._at, self._token, self._depth = _At.IN_VALUE, [], 0
                self._in_value(char)
            case _At.KEY if char == '"':
                self._at, self._token = _At.IN_KEY, []
            case _At.KEY if char == "}":
                self._end()
            case _At.KEY if char != ",":
                self.broken = True

    def _expect(self, char: str, wanted: str, then: _At) -> None:
        self._at = then
        self.broken = char != wanted

    def _in_key(self, char: str) -> None:
        if char != '"':
            self._token.append(char)
            return
        self._key, self._at = "".join(self._token), _At.COLON
        self.broken = self._key not in KEYS

    def _in_value(self, char: str) -> None:
        if self._string:
            self._torn = self._torn or char in "\r\n"
            self._string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._string, self._torn = True, False
        elif char in "{[":
            self._depth += 1
        elif char in "}]" and self._depth:
            self._depth -= 1
            if not self._depth:
                self._add(char)
                self._finish_value()
            return self._add(char) if self._depth else None
        elif not self._depth and char in ",}":
            self._finish_value()
            return self._end() if char == "}" else None
        self._add(char)
        return None

    def _add(self, char: str) -> None:
        self._token.append(char)
        if self._key in ARGUMENTS and self._token[0] == "{":
            self._new.append(char)

    def _finish_value(self) -> None:
        """A value has ended."""
        value, self._at = "".join(self._token).strip(), _At.KEY
        self._token = []
        if self._key == NAME and value:
            self._take_name(value)
        elif self._key in ARGUMENTS and value and value[0] != "{":
            self._held += _unquoted(value)
        if self._whole:
            self._end()

    def _take_name(self, value: str) -> None:
        try:
            name = json.loads(value)
        except (ValueError, RecursionError):
            name = None
        self.broken = not isinstance(name, str)
        self.name = name if isinstance(name, str) else None

    def _end(self) -> None:
        self.done = self.name is not None
        self.broken = not self.done


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` that may begin `mark` or are it, and space before them or at the end."""
    kept = next((size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), 0)
    before = text[: len(text) - kept]
    return kept + len(before) - len(before.rstrip())


def _unquoted(value: str) -> str:
    """Arguments that were written as a string of JSON, as that JSON; null as none."""
    try:
        inner = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return inner if isinstance(inner, str) else "{}" if inner is None else value
