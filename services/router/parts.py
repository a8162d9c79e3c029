"""What an output says, taken apart into text, reasoning and calls of tools, as its pieces come."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """News of call `index`: its id and name come first, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What a piece of output says."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class Reader(Protocol):
    """Takes one output apart."""

    def push(self, text: str) -> Said:
        """New text of the output."""

    def end(self) -> Said:
        """The output is over; what was held back."""


class TextReader:
    """An output that is text alone."""

    def push(self, text: str) -> Said:
        """New text."""
        return Said(content=text)

    def end(self) -> Said:
        """Nothing is held back."""
        return Said()
