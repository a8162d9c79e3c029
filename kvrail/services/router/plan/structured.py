"""The form that a request asks of its output, as a grammar.

Four spellings: OpenAI's `response_format`, vLLM's `structured_outputs`, llama.cpp's `json_schema` and `grammar`. A
request may use one of them. Errors name the parameter, and the place in a schema where that is known.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from kvrail.errors import InvalidRequestError
from kvrail.grammar import Checker, texts
from kvrail.grammar.texts import Part
from kvrail.services.router.errors import refuse
from kvrail.services.router.plan.structural import structural
from kvrail.services.router.schema import Request
from kvrail.text import Tokenizer
from kvrail.values.sampling import MAX_GRAMMAR_BYTES

ANY_OBJECT = {"type": "object"}
STRUCTURED_OUTPUTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_CHOICES = 1024
MAX_SCHEMA_CHARS = 4 * MAX_GRAMMAR_BYTES
"""Longest schema that comes as a text, with its indents."""
_QUOTED = re.compile(r"""["']([^"']+)["']"""), re.compile(r": (\S+)$")
"""The part of a schema that a message of llguidance quotes."""


class OutputFormat:
    """The form that a request asks for. param: the field that asks for it. schema: its JSON schema, where it has one.

    all_tokens: whether it binds reasoning too.
    """

    def __init__(
        self, param: str, make: Callable[[], Part], schema: object = None, *, all_tokens: bool = False
    ) -> None:
        self.param = param
        self.schema = schema
        self.all_tokens = all_tokens
        self._make = make

    def part(self) -> Part:
        """The grammar; InvalidRequestError names the parameter."""
        try:
            return self._make()
        except InvalidRequestError as error:
            raise (placed(error, self) if error.param is None else error) from None


async def check(checker: Checker, text: str, client: str, asked: OutputFormat) -> str:
    """A client's grammar as workers take it; InvalidRequestError names the parameter of `asked`."""
    try:
        return await checker.check(text, client)
    except InvalidRequestError as error:
        raise placed(error, asked) from None


def placed(error: InvalidRequestError, asked: OutputFormat) -> InvalidRequestError:
    """The same error with the parameter's name and, where it quotes a word of a schema, that word's place."""
    param = asked.param
    words = {word for quoted in _QUOTED for word in quoted.findall(str(error))}
    place = next((path for path, word in _words(asked.schema) if word in words), None) if words else None
    if place is not None:
        param = f"{param}.{place}"
    return InvalidRequestError(f"{param}: {error}", param=param)


def format_of(request: Request, tokenizer: Tokenizer) -> OutputFormat | None:
    """The form that `request` asks for, if any; InvalidRequestError where it asks for several or an unknown one."""
    found = [
        asked
        for asked in (
            _response_format(request.response_format, tokenizer),
            _structured_outputs(request.structured_outputs, tokenizer),
            None if request.json_schema is None else _schema("json_schema", request.json_schema),
            None if not request.grammar else _grammar("grammar", request.grammar),
            _allowed_tokens(request, tokenizer),
            _banned_words(request, tokenizer),
        )
        if asked is not None
    ]
    if len(found) > 1:
        refuse(found[1].param, f"cannot be combined with {found[0].param}; send one of them")
    return found[0] if found else None


def _allowed_tokens(request: Request, tokenizer: Tokenizer) -> OutputFormat | None:
    """The tokens that `request` allows, if it names any: the output is made of these alone."""
    if request.allowed_token_ids is None:
        return None
    param = "allowed_token_ids"
    allowed = set(request.allowed_token_ids)
    if max(allowed) >= tokenizer.vocab_size:
        refuse(param, f"token id {max(allowed)} is not in the model's vocabulary of {tokenizer.vocab_size}")
    ends = bool(allowed & tokenizer.eos_token_ids) and not request.ignore_eos
    written = sorted(allowed - tokenizer.eos_token_ids)
    if not written:
        refuse(param, "has only tokens that end the output; name others too")
    return OutputFormat(param, lambda: texts.from_tokens(written, ends=ends), all_tokens=True)


def _banned_words(request: Request, tokenizer: Tokenizer) -> OutputFormat | None:
    """The words that `request` bans, if it names some.

    As with vLLM: of each word the tokens of its text, and those of its text behind a space where these are as many and
    begin with another token.
    """
    if not request.bad_words:
        return None
    param = "bad_words"
    if request.ignore_eos:
        refuse(param, "cannot be combined with ignore_eos; set min_tokens to max_tokens instead")
    banned: list[tuple[int, ...]] = []
    for word in request.bad_words:
        plain, spaced = (tuple(tokenizer.encode(f"{space}{word.lstrip()}", False)) for space in ("", " "))
        banned.append(plain)
        if spaced[:1] != plain[:1] and len(spaced) == len(plain):
            banned.append(spaced)
    banned = [tokens for tokens in banned if tokens]
    return OutputFormat(param, lambda: texts.without_tokens(banned, sorted(tokenizer.eos_token_ids)), all_tokens=True)


def _response_format(value: dict[str, Any] | None, tokenizer: Tokenizer) -> OutputFormat | None:
    if value is None or value.get("type") == "text":
        return None
    kind = value.get("type")
    if kind == "json_object":
        own = value.get("schema")  # llama.cpp's
        return _schema("response_format.schema", own) if own is not None else _schema("response_format", ANY_OBJECT)
    if kind == "structural_tag":
        return _tags("response_format", value, tokenizer)
    if kind != "json_schema":
        refuse("response_format.type", f"is {kind!r}; choose text, json_object, json_schema or structural_tag")
    described = value.get("json_schema")
    if not isinstance(described, dict):
        refuse("response_format.json_schema", "field required; send an object with name and schema")
    if not isinstance(described.get("name"), str):
        refuse("response_format.json_schema.name", "field required; name the schema")
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse("response_format.json_schema.strict", f"is {strict!r}; send true or false")
    schema = described.get("schema")
    if schema is None:
        refuse("response_format.json_schema.schema", "field required; send a JSON schema")
    return _schema("response_format.json_schema.schema", schema, lenient=not strict)


def _structured_outputs(value: dict[str, Any] | None, tokenizer: Tokenizer) -> OutputFormat | None:
    if value is None:
        return None
    given = [key for key, each in value.items() if each not in (None, False)]
    for key in given:
        if key not in STRUCTURED_OUTPUTS:
            refuse(f"structured_outputs.{key}", f"not supported; known are {', '.join(STRUCTURED_OUTPUTS)}")
    if len(given) != 1:
        refuse("structured_outputs", f"needs exactly one of {', '.join(STRUCTURED_OUTPUTS)}; it has {len(given)}")
    key, param = given[0], f"structured_outputs.{given[0]}"
    match key, value[key]:
        case "json" | "json_object", schema if key == "json" or schema is True:
            return _schema(param, schema if key == "json" else ANY_OBJECT)
        case "choice", list(choices):
            return _choice(param, choices)
        case "regex", str(pattern):
            _refuse_longer(param, pattern, MAX_GRAMMAR_BYTES)
            return OutputFormat(param, lambda: texts.from_regex(pattern))
        case "grammar", str(text):
            return _grammar(param, text)
        case "structural_tag", str() | dict() as tags:
            return _tags(param, tags, tokenizer)
        case _:
            refuse(param, "has the wrong type; regex and grammar are strings, choice is a list, json_object is true")


def _schema(param: str, schema: object, *, lenient: bool = False) -> OutputFormat:
    if isinstance(schema, str):
        schema = _json(param, schema)
    return OutputFormat(param, lambda: texts.from_schema(schema, lenient=lenient), schema)


def _tags(param: str, value: str | dict[str, Any], tokenizer: Tokenizer) -> OutputFormat:
    if isinstance(value, str):
        value = _json(param, value)
    if not isinstance(value, dict):
        refuse(param, "must be an object; send one, or its JSON")
    return OutputFormat(param, lambda: texts.from_lark(structural(param, value, tokenizer)), value)


def _json(param: str, text: str) -> Any:
    _refuse_longer(param, text, MAX_SCHEMA_CHARS)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        refuse(param, f"is no JSON: {error}")


def _choice(param: str, choices: list[Any]) -> OutputFormat:
    if not 0 < len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        refuse(param, f"must be a list of 1 to {MAX_CHOICES} strings, none of them empty")
    return OutputFormat(param, lambda: texts.from_choice(choices))


def _grammar(param: str, text: str) -> OutputFormat:
    _refuse_longer(param, text, MAX_GRAMMAR_BYTES)
    return OutputFormat(param, lambda: texts.from_lark_or_gbnf(text))


def _refuse_longer(param: str, text: str, most: int) -> None:
    if len(text) > most:
        refuse(param, f"has {len(text)} characters, more than {most}; send a shorter one")


def _words(schema: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Keys and texts of a schema, with the dotted path to each; nearest first."""
    level = [(path, schema)]
    while level:
        inner: list[tuple[str, object]] = []
        for where, value in level:
            items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            for key, each in items:
                deeper = f"{where}.{key}" if where else str(key)
                yield deeper, str(key)
                if isinstance(each, str):
                    yield deeper, each.removeprefix("#")
                inner.append((deeper, each))
        level = inner
