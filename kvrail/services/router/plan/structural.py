"""Structural tags as a grammar: text is free up to a trigger, and must have a given form behind it.

Both forms of vLLM: `{"structures": [{"begin", "schema", "end"}], "triggers"}`, and `{"format": …}`, a tree of the kinds
in KINDS. A begin, end or trigger that begins with a special token means that token.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from kvrail.errors import InvalidRequestError
from kvrail.grammar import texts
from kvrail.services.router.errors import refuse
from kvrail.text import Tokenizer
from kvrail.values.sampling import MAX_GRAMMAR_BYTES

KINDS = ("any_text", "const_string", "json_schema", "or", "regex", "sequence", "tag", "triggered_tags")
MAX_DEPTH = 16
MAX_ELEMENTS = 256
"""Of one list."""
_ANY = r"/(.|\n)*/"

Json = dict[str, Any]


def structural(param: str, value: Json, tokenizer: Tokenizer) -> str:
    """The grammar in Lark; InvalidRequestError names the place in `value`, which the request calls `param`."""
    if "structures" in value:
        tags = [
            {"begin": each.get("begin"), "content": {"type": "json_schema", "json_schema": each.get("schema")}}
            | {"end": each.get("end")}
            for each in _items(param, value, "structures")
        ]
        whole: Any = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
        return _Rules(tokenizer).written(param, whole)
    if "format" not in value:
        refuse(f"{param}.format", "field required; send a format, or structures and triggers")
    return _Rules(tokenizer).written(f"{param}.format", value["format"])


class _Rules:
    """The rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        specials = sorted(map(tokenizer.token, tokenizer.special_ids), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, filter(None, specials))))
        self._rules: list[str] = []
        self._length = 0
        self._kinds: dict[str, Callable[[str, Json, int], str]] = {
            "any_text": lambda *_: self._rule("TEXT", _ANY),
            "const_string": lambda param, value, _: self._spelled(_text(param, value, "value")),
            "json_schema": self._json,
            "or": lambda *args: "(" + " | ".join(self._elements(*args)) + ")",
            "regex": lambda param, value, _: self._rule("REGEX", _pattern(_text(param, value, "pattern"))),
            "sequence": lambda *args: " ".join(self._elements(*args)),
            "tag": self._tag,
            "triggered_tags": self._triggered,
        }

    def written(self, param: str, value: Any) -> str:
        """The grammar of a format."""
        return "\n".join([f"start: {self._format(param, value, 0)}", *self._rules])

    def _rule(self, name: str, body: str, mark: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{mark}: {body}")
        self._length += len(body)
        if self._length > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(f"makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes; send a smaller one")
        return name

    def _format(self, param: str, value: Any, depth: int) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in self._kinds:
            refuse(f"{param}.type", f"is {str(kind)[:80]!r}; choose one of {', '.join(KINDS)}")
        if depth > MAX_DEPTH:
            refuse(param, f"is nested deeper than {MAX_DEPTH} levels; send a flatter format")
        return self._kinds[kind](param, value, depth + 1)

    def _json(self, param: str, value: Json, _: int) -> str:
        schema = value.get("json_schema")
        if not isinstance(schema, dict | bool):
            refuse(f"{param}.json_schema", "field required; send a JSON schema")
        return self._rule("json", "%json " + json.dumps(texts.schema_of(schema, lenient=False)))

    def _elements(self, param: str, value: Json, depth: int) -> list[str]:
        found = _items(param, value, "elements")
        return [self._format(f"{param}.elements.{i}", each, depth) for i, each in enumerate(found)]

    def _tag(self, param: str, value: Json, depth: int) -> str:
        return f"{self._spelled(_text(param, value, 'begin'))} {self._rest(param, value, depth)}"

    def _rest(self, param: str, value: Json, depth: int) -> str:
        """What follows a tag's begin."""
        content, end = value.get("content"), value.get("end") or ""
        if not isinstance(end, str):
            refuse(f"{param}.end", "must be a string; send one")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            return self._until(end, _ANY)
        return f"{self._format(f'{param}.content', content, depth)} {self._spelled(end)}"

    def _triggered(self, param: str, value: Json, depth: int) -> str:
        triggers, tags = _items(param, value, "triggers"), _items(param, value, "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            refuse(f"{param}.triggers", "must be strings, none of them empty")
        free = self._rule("FREE", f"{_ANY} & ~/(.|\\n)*({'|'.join(map(_escaped, triggers))})(.|\\n)*/")
        begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(tags):
            begin = _text(f"{param}.tags.{i}", tag, "begin")
            trigger = next(filter(begin.startswith, triggers), None)
            if trigger is None:
                refuse(f"{param}.tags.{i}.begin", "begins with none of the triggers; change one of them")
            rest = self._spelled(begin.removeprefix(trigger))
            begun[trigger].append(f"{rest} {self._rest(f'{param}.tags.{i}', tag, depth)}")
        found = [f"{self._until(trigger, free)} ({' | '.join(bodies)})" for trigger, bodies in begun.items() if bodies]
        tag = self._rule("tag", " | ".join(found))
        if value.get("stop_after_first"):
            return tag if value.get("at_least_one") else f"({tag} | {free})"
        return f"{tag}{'+' if value.get('at_least_one') else '*'} {free}"

    def _until(self, mark: str, text: str) -> str:
        """Text up to a mark, and the mark. A special token ends the text by itself."""
        if self._special(mark):
            return f"{self._rule('TEXT', text)} {self._spelled(mark)}"
        return self._rule("until", f"{self._rule('TEXT', text)} {texts.literal(mark)}", "[lazy]")

    def _spelled(self, text: str) -> str:
        """A text as Lark writes it, with the special token that it begins with."""
        special = self._special(text)
        rest = text.removeprefix(special)
        token = f"<[{self._tokenizer.special_id(special)}]>" if special else ""
        return " ".join(filter(None, (token, texts.literal(rest) if rest else "")))

    def _special(self, text: str) -> str:
        """The special token that a text begins with; empty: none."""
        return (self._specials.match(text) or [""])[0]


def _items(param: str, value: Json, name: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_ELEMENTS:
        refuse(f"{param}.{name}", f"must be a list of 1 to {MAX_ELEMENTS} entries")
    if name in ("structures", "tags") and not all(isinstance(each, dict) for each in found):
        refuse(f"{param}.{name}", "must be objects")
    return found


def _text(param: str, value: Json, name: str) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not found:
        refuse(f"{param}.{name}", "field required; send a string that is not empty")
    return found


def _escaped(text: str) -> str:
    return _slashes(re.escape(text))


def _pattern(pattern: str) -> str:
    return f"/{_slashes(pattern)}/"


def _slashes(pattern: str) -> str:
    """A regular expression between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
