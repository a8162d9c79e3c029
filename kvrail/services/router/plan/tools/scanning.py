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

    Arguments are given out as they come once the name is known; before, they are kept. raw: all that was read.
    """

    def __init__(self, name: str | None = None) -> None:
        """name: where it was written elsewhere and the object is the arguments themselves."""
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

    @property
    def over(self) -> bool:
        """Whether nothing more is read."""
        return self.done or self.broken

    def push(self, text: str) -> str:
        """Read `text` up to the call's end; returns what is behind it."""
        for position, char in enumerate(text):
            if self.over:
                self.raw += text[:position]
                return text[position:]
            self._step(char)
        self.raw += text
        return ""

    def take(self) -> str:
        """Arguments that have come since the last time; empty before the name is known."""
        if self.name is None:
            return ""
        text, self._held, self._new = self._held + "".join(self._new), "", []
        self._any = self._any or bool(text)
        if self.done and not self._any:
            self._any = True
            return "{}"
        return text

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
            self._string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._string = True
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
        except ValueError:
            name = None
        self.broken = not isinstance(name, str)
        self.name = name if isinstance(name, str) else None

    def _end(self) -> None:
        self.done = self.name is not None
        self.broken = not self.done


def _unquoted(value: str) -> str:
    """Arguments that were written as a string of JSON, as that JSON; null as none."""
    try:
        inner = json.loads(value)
    except ValueError:
        return value
    return inner if isinstance(inner, str) else "{}" if inner is None else value
