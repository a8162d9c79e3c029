"""The forms in which models write calls of tools, and reading them.

hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>, one or several (Hermes, Qwen)
llama3_json  {"name": …, "parameters": {…}}, several with ; between, maybe behind <|python_tag|>
mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]name{…} one by one
"""

import secrets
from dataclasses import dataclass, field

from kvrail.errors import ConfigError
from kvrail.services.router.plan.tools.scanning import CallScanner, held_back

_ID_CHARS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class CallForm:
    """One form. opens, closes: marks around a call, or around all of them.

    bare: a call also opens with its brace where the output begins. listed: the calls of one mark are a list. between:
    what is written between calls, where they are constrained. arguments: the key of the arguments. id_chars: length of
    a call's id, without its prefix.
    """

    name: str
    opens: str
    closes: str = ""
    bare: bool = False
    listed: bool = False
    between: str = "\n"
    arguments: str = "arguments"
    id_prefix: str = "call_"
    id_chars: int = 24

    def new_id(self) -> str:
        """An id that no other call has."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(self.id_chars))


FORMS = {
    form.name: form
    for form in (
        CallForm("hermes", "<tool_call>", "</tool_call>"),
        CallForm("llama3_json", "<|python_tag|>", bare=True, between="; ", arguments="parameters"),
        CallForm("mistral", "[TOOL_CALLS]", listed=True, between=", ", id_prefix="", id_chars=9),
    )
}


def form_for(template: str, chosen: str) -> CallForm | None:
    """The form of a model with this chat template; None where there is none that is known.

    chosen: a form's name, none, or auto: by the marks that the template shows. A template without tools gets the first.
    """
    if chosen not in ("auto", "none", *FORMS):
        raise ConfigError(f"tool_parser is {chosen!r}; choose auto, none or one of {', '.join(FORMS)}")
    if chosen != "auto":
        return FORMS.get(chosen)
    if "<function=" in template or "<arg_key>" in template:
        return None  # Qwen3-Coder's and GLM's calls have Hermes's marks, and no JSON
    for form in FORMS.values():
        if form.opens in template:
            return form
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return FORMS["llama3_json"]
    return None if "tools" in template else FORMS["hermes"]


@dataclass(slots=True)
class CallDelta:
    """News of call `index`: its id and name come first, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Said:
    """What an output says, taken apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class CallReader:
    """Takes the calls out of one output."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._marks = tuple(filter(None, (form.opens, form.closes)))
        self._buffer = ""
        self._scanner: CallScanner | None = None
        self._opened = False  # a mark was read, its call not yet
        self._announced = False  # the name of the call being read was sent
        self._between = False  # behind a call
        self._begun = False  # some text was said
        self.count = 0

    def push(self, text: str) -> Said:
        """New text of the output."""
        self._buffer += text
        said = Said()
        while self._buffer and self._advance(said):
            pass
        return said

    def end(self) -> Said:
        """The output is over: what was held back, and a call that was begun but never named, is text."""
        said = Said()
        if self._scanner is not None:
            self._scanner.end()
            self._tell_call(said, self._scanner)
        elif self._scanner is None:
            said.content = self._marked(self._buffer) if self._opened else self._buffer
            if self._between:
                said.content = said.content.strip()
                if said.content and self._form.closes.startswith(said.content):
                    said.content = ""  # the length has cut the mark behind a call
        self._scanner, self._buffer = None, ""
        return said

    def _marked(self, text: str) -> str:
        return (self._form.opens if self._opened else "") + text

    def _advance(self, said: Said) -> bool:
        """Take one step; False where more text must come first."""
        if self._scanner is not None:
            return self._read_call(said, self._scanner)
        if self._opened:
            return self._open()
        return self._behind_call() if self._between else self._read_text(said)

    def _read_text(self, said: Said) -> bool:
        """Text up to a mark; what may be the beginning of one, and space before it, is held back."""
        form, text = self._form, self._buffer
        start = text.lstrip()
        if form.bare and not self._begun:
            if start.startswith("{"):
                self._buffer, self._scanner = start, CallScanner(self._marks)
                return True
            if not start:
                return False
        before, mark, after = text.partition(form.opens)
        if mark:
            self._buffer, self._opened = after, True
            said.content += before.rstrip()
            return True
        kept = held_back(text, form.opens)
        self._buffer = text[len(text) - kept :]
        said.content += text[: len(text) - kept]
        self._begun = self._begun or bool(said.content.strip())
        return False

    def _open(self) -> bool:
        """Behind a mark: the brace of a call, of a list of them, or a name before its arguments."""
        text = self._buffer.lstrip()
        if self._form.listed:
            text = text.removeprefix("[").lstrip() if not text.startswith("[ARGS]") else text
            name, brace, _ = text.partition("{")
            if not brace:
                return False
            if name:
                self._buffer = text[len(name) :]
                self._scanner = CallScanner(self._marks, name.partition("[")[0].strip())
                return True
        if not text:
            return False
        self._buffer, self._scanner = text, CallScanner(self._marks)
        return True

    def _read_call(self, said: Said, scanner: CallScanner) -> bool:
        self._buffer = scanner.push(self._buffer)
        self._tell_call(said, scanner)
        if scanner.over:
            self._between = self._announced
            self._scanner, self._opened, self._announced = None, False, False
        return scanner.over

    def _tell_call(self, said: Said, scanner: CallScanner) -> None:
        """Add what is new of a call; one that is broken before its name is known is text."""
        if scanner.name is not None and not self._announced:
            said.calls.append(CallDelta(self.count, self._form.new_id(), scanner.name))
            self._announced = True
            self.count += 1
        if self._announced:
            arguments = scanner.take()
            if arguments:
                said.calls.append(CallDelta(self.count - 1, arguments=arguments))
        elif scanner.broken:
            said.content += self._marked(scanner.raw)
            self._begun = True

    def _behind_call(self) -> bool:
        """Pass over what stands between calls; the next one, or text, follows."""
        form, text = self._form, self._buffer.lstrip()
        if form.listed or form.bare:
            text = text.lstrip(" \t\r\n,;]")
        self._buffer = text
        if not text or (form.closes != text and form.closes.startswith(text)):
            return False
        if form.closes and text.startswith(form.closes):
            self._buffer = text[len(form.closes) :]
            return bool(self._buffer)
        if text.startswith("{") and (form.listed or form.bare):
            self._scanner = CallScanner(self._marks)
        elif not form.opens.startswith(text) or form.opens == text:
            self._between = False
        else:
            return False
        return True
