"""Taking an output apart as it comes: what the model thinks, what it says, which tools it calls."""

from kvrail.services.router.plan.tools.forms import CallForm, CallReader, Said
from kvrail.services.router.plan.tools.scanning import held_back

THINK, THOUGHT = "<think>", "</think>"


class ThoughtReader:
    """Parts an output at the end of its reasoning."""

    def __init__(self, *, open: bool) -> None:
        """open: whether the prompt has opened the reasoning, so that the output begins inside."""
        self._inside = open
        self._beginning = True  # nothing but space was said
        self._thinking = False  # some of the reasoning was read
        self._over = False
        self._buffer = ""

    def push(self, text: str) -> Said:
        """New text: reasoning, content, or both."""
        self._buffer += text
        said = Said()
        if self._beginning and not self._over:
            start = self._buffer.lstrip()
            if len(start) < len(THINK) and THINK.startswith(start):
                return said
            self._beginning = False
            if start.startswith(THINK):
                self._inside, self._buffer = True, start[len(THINK) :]
            elif self._inside:
                self._buffer = start
            else:
                self._over = True
        if not self._over:
            self._read_thought(said)
        if self._over and (self._buffer.strip() or not self._inside):
            said.content, self._buffer = self._buffer.lstrip("\n") if self._inside else self._buffer, ""
            self._inside = False
        return said

    def end(self) -> Said:
        """The output is over: what was held back."""
        rest, self._buffer = self._buffer, ""
        if self._over or not self._inside:
            return Said(content="" if self._inside else rest)
        return Said(reasoning=rest.rstrip())

    def _read_thought(self, said: Said) -> None:
        if not self._thinking:
            self._buffer = self._buffer.lstrip("\n")
            self._thinking = bool(self._buffer)
        thought, mark, rest = self._buffer.partition(THOUGHT)
        if mark:
            said.reasoning, self._buffer, self._over = thought.rstrip(), rest, True
            return
        kept = held_back(thought, THOUGHT)
        said.reasoning, self._buffer = thought[: len(thought) - kept], thought[len(thought) - kept :]


class OutputReader:
    """Reads one choice's output. called: whether it has called a tool."""

    def __init__(self, form: CallForm | None, thoughts: ThoughtReader | None, most_calls: int | None = None) -> None:
        """form: of calls, None where none are looked for. thoughts: None where reasoning is not looked for.

        most_calls: calls that are shown, None: all. Further ones are left out, as with vLLM.
        """
        self._most_calls = most_calls
        self._calls = None if form is None else CallReader(form)
        self._thoughts = thoughts

    @property
    def called(self) -> bool:
        """Whether the output has called a tool so far."""
        return self._calls is not None and self._calls.count > 0

    def push(self, text: str, *, last: bool) -> Said:
        """New text of the output; last: the output ends with it."""
        said = Said(content=text) if self._thoughts is None else self._thoughts.push(text)
        if last and self._thoughts is not None:
            rest = self._thoughts.end()
            said.content, said.reasoning = said.content + rest.content, said.reasoning + rest.reasoning
        if self._calls is None:
            return said
        parts = [self._calls.push(said.content)] + ([self._calls.end()] if last else [])
        return Said(
            content="".join(part.content for part in parts),
            reasoning=said.reasoning,
            calls=[
                call
                for part in parts
                for call in part.calls
                if self._most_calls is None or call.index < self._most_calls
            ],
        )
