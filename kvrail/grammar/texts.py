"""Forms that clients ask for, as texts that llguidance compiles: JSON schemas, regular expressions, choices, grammars.

Texts travel to the workers. A text holds one grammar or several; the first one then names the others. Tool calls, in
their model's form around arguments under a schema, are grammars of that kind.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import LLMatcher

from kvrail.errors import InvalidRequestError
from kvrail.grammar.closing import closed
from kvrail.grammar.compiling import digest
from kvrail.grammar.keys import counted, named
from kvrail.values.sampling import MAX_GRAMMAR_BYTES

MAX_DEPTH = 50
"""Levels of a schema. llguidance reads up to 128 of JSON, and each of a schema takes about two."""
WHITESPACE = r"( |\n[ \t]{0,20})"
"""Between JSON's tokens, or nothing: a space, or a line's end and an indent, as llama.cpp has it. Without a bound a
weak model writes spaces until it is cut off."""
MAX_OPTIONAL = 512
"""Optional properties of one object. llguidance takes time by their square, 1.6 s for 6,000, and cannot follow more
than some 500 of them."""
MAX_BANNED = 4096
"""Tokens of all sequences that an output must not have."""
MAX_TOKENS = 1 << 20
"""Most tokens of an output that has no end of its own: more than a context holds."""
OPTIONS = "x-guidance"
"""The key under which a schema carries llguidance's options."""
EITHER = "lark_or_gbnf"
"""The key of a part that kvrail.grammar.checking puts into Lark: to find out which it is can take minutes already."""

Json = dict[str, Any]
Part = dict[str, Any]
"""One grammar of a text: an object that llguidance reads."""


def schema_of(schema: object, *, lenient: bool) -> Json:
    """A schema in the form that llguidance takes; lenient: keywords that it does not know are ignored.

    Its objects are closed (kvrail.grammar.closing), their keys bounded (kvrail.grammar.keys). Raises
    InvalidRequestError where it is not a schema, is too deep, or has objects whose keys are too many or cannot be
    bounded.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequestError("is no JSON schema under which anything is valid; send an object")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"is nested deeper than {MAX_DEPTH} levels; send a flatter schema, with $defs")
    spelled: Json = named(schema)
    if (optional := _most_optional(spelled)) > MAX_OPTIONAL:
        raise InvalidRequestError(
            f"has an object of {optional} optional properties, more than {MAX_OPTIONAL}; "
            "require some of them, or put some into objects within"
        )
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return {**counted(closed(spelled), lenient=lenient), OPTIONS: options}


def from_schema(schema: object, *, lenient: bool) -> Part:
    """JSON that is valid under `schema`."""
    return {"json_schema": schema_of(schema, lenient=lenient)}


def from_tokens(token_ids: Sequence[int], *, ends: bool) -> Part:
    """Any of these tokens, sorted, one behind the other; ends: whether the output may end before it is cut off.

    Raises InvalidRequestError where their text is too long.
    """
    spans: list[list[int]] = []
    for token_id in token_ids:
        if spans and spans[-1][1] == token_id - 1:
            spans[-1][1] = token_id
        else:
            spans.append([token_id, token_id])
    text = ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in spans)
    if len(text) > MAX_GRAMMAR_BYTES // 2:
        raise InvalidRequestError(f"{len(token_ids)} tokens in {len(spans)} ranges are too many; name fewer")
    return from_lark(f"start: <[{text}]>" + ("*" if ends else f"{{{MAX_TOKENS}}}"))


def without_tokens(banned: Sequence[Sequence[int]], ends: Sequence[int]) -> Part:
    """Any tokens without a banned sequence among them; ends: tokens that end an output. No sequence is empty.

    Raises InvalidRequestError where they are too many. The rules are those of an automaton (Aho and Corasick, 1975):
    its states are the beginnings of banned sequences. The state of an output is the longest of these that it ends with.
    """
    if sum(map(len, banned)) > MAX_BANNED:
        raise InvalidRequestError(
            f"{sum(map(len, banned))} tokens are more than {MAX_BANNED}; send fewer or shorter words"
        )
    first, moves = _automaton({tuple(tokens) for tokens in banned})
    names = {state: f"s{i}" for i, state in enumerate(moves)}
    rules: dict[str, list[str]] = {name: [] for name in names.values()}
    rules["s0"] = ['""']
    moved = {token for tokens in moves.values() for token in tokens}
    for token, state in first.items():
        if state is not None:
            sources = [name for each, name in names.items() if token not in moves[each]] if token in moved else ["any"]
            rules[names[state]] += [f"{source} <[{token}]>" for source in sources]
    for state, name in names.items():
        rules["s0"].append(f"{name} <[^{_listed({*first, *moves[state], *ends})}]>")
        for target in set(moves[state].values()) - {None}:
            tokens = [token for token, each in moves[state].items() if each == target]
            rules[names[target or ()]].append(f"{name} <[{_listed(tokens)}]>")
    lines = [
        f"{name}: {' | '.join(bodies)}" for name, bodies in {"start": ["any"], "any": list(rules), **rules}.items()
    ]
    text = "\n".join(lines)
    if len(text) > MAX_GRAMMAR_BYTES * 3 // 4:
        raise InvalidRequestError(f"{len(banned)} token sequences are too many; send fewer or shorter words")
    return from_lark(text)


State = tuple[int, ...]


def _automaton(whole: set[State]) -> tuple[dict[int, State | None], dict[State, dict[int, State | None]]]:
    """The states to which tokens lead that begin a sequence of `whole`, and in each state those that lead elsewhere.

    None: those tokens complete a sequence.
    """
    onward: dict[State, dict[int, State | None]] = {}
    for tokens in whole:
        for count, token in enumerate(tokens):
            following = tokens[: count + 1]
            onward.setdefault(tokens[:count], {})[token] = None if following in whole else following
    first = onward[()]
    moves: dict[State, dict[int, State | None]] = {(): {}}
    waiting: list[tuple[State, State]] = [(state, ()) for state in first.values() if state is not None]
    for state, shorter in waiting:
        moves[state] = dict(moves[shorter])
        for token, longer in onward[state].items():
            behind = moves[shorter].get(token, first.get(token, ()))
            moves[state][token] = longer if behind is not None else None
            if longer is not None and behind is not None:
                waiting.append((longer, behind))
    return first, moves


def _listed(token_ids: Iterable[int]) -> str:
    return ",".join(map(str, sorted(token_ids)))


def from_regex(pattern: str) -> Part:
    """Text that matches all of `pattern`, in the syntax of Rust's regex."""
    digest(pattern)  # llguidance takes no half of a surrogate pair
    (part,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return dict(part)


def from_choice(choices: Sequence[str]) -> Part:
    """One of `choices`."""
    return from_lark("start: " + " | ".join(literal(choice) for choice in choices))


def from_lark(text: str) -> Part:
    """A grammar in llguidance's Lark."""
    return {"lark_grammar": text}


def from_lark_or_gbnf(text: str) -> Part:
    """The same, or one in llama.cpp's GBNF. The text that the checker returns has it in Lark."""
    return {EITHER: text}


def whole(first: Part, **others: Part) -> str:
    """The text that travels: the grammar `first`, in whose Lark `@name` stands for one of the others."""
    named = [{"name": name, **part} for name, part in others.items()]
    return json.dumps({"grammars": [first, *named]}, ensure_ascii=False)


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _depth(value: object) -> int:
    """Levels of lists and objects."""
    level, depth = [value], -1
    while level:
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level, depth = inner, depth + 1
    return depth


def _most_optional(value: object) -> int:
    """Optional properties of the object that has the most."""
    most, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            named, required = each.get("properties"), each.get("required")
            if isinstance(named, dict):
                names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
                most = max(most, len(named.keys() - set(names)))
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return most
