"""Chat templates: Jinja in the model's files, rendered in a sandbox with transformers' conventions."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvrail.errors import ConfigError, InvalidRequestError

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise over a message of a shape that it does not expect."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks text for training; serving renders it as it stands."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(lineno)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A model's chat templates, compiled.

    sources: name -> Jinja source; "tool_use" is taken for requests with tools where it exists, else "default".
    variables: special tokens by name (bos_token, eos_token …), visible to the template.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        environment = make_environment()
        self._sources = dict(sources)
        self.variables = dict(variables)
        self._compiled: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}; correct chat_template.jinja or "
                    "tokenizer_config.json"
                ) from error

    @property
    def source(self) -> str:
        """The Jinja of all templates."""
        return "\n".join(self._sources.values())

    def replaced(self, source: str) -> "ChatTemplate":
        """A request's own template, with the same variables; InvalidRequestError where it is no Jinja."""
        try:
            return ChatTemplate({"default": source}, self.variables)
        except ConfigError as error:
            raise InvalidRequestError(f"chat_template: {error.__cause__}; correct it", param="chat_template") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text; InvalidRequestError where messages and template do not fit."""
        name = self._select(tools)
        if not messages:
            raise InvalidRequestError("messages is empty; send at least one message", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                param="continue_final_message",
            )
        chat = [_prepare(message) for message in messages]
        final = _mark_final(chat, self._sources[name]) if continue_final_message else ""
        variables = {
            **self.variables,
            **kwargs,
            "messages": chat,
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._compiled[name].render(variables)
        except RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        _check_roles(messages, text)
        return _cut_at_mark(text, final) if continue_final_message else text

    def _select(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools is not None and "tool_use" in self._compiled:
            return "tool_use"
        if "default" in self._compiled:
            return "default"
        raise InvalidRequestError(
            "this model has no chat template; send the whole prompt to /v1/completions instead", param="messages"
        )


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without null fields, with a reasoning text under each name that templates read."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in REASONING_FIELDS if key in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _check_roles(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise InvalidRequestError for a message of a role that only some templates know, where `text` lacks it."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if message["role"] in KNOWN_ROLES or not isinstance(content, str):
            continue
        if content.strip() not in text:
            raise InvalidRequestError(
                f"messages.{i}.role: the model's chat template leaves out messages of role {message['role'][:80]!r}; "
                "send another role",
                param=f"messages.{i}.role",
            )


def _mark_final(chat: list[dict[str, Any]], source: str) -> str:
    """Put a mark behind the final message's text, in place; returns that text."""
    content = chat[-1].get("content")
    if "content" in source:
        if isinstance(content, str):
            chat[-1]["content"] = content + CONTINUE_TAG
            return content
        if isinstance(content, list):
            for i in range(len(content) - 1, -1, -1):
                part = content[i]
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    marked = {**part, "text": part["text"] + CONTINUE_TAG}
                    chat[-1]["content"] = [*content[:i], marked, *content[i + 1 :]]
                    return str(part["text"])
    raise InvalidRequestError(
        "continue_final_message is set, but the final message has no text to continue; give it a content",
        param="messages",
    )


def _cut_at_mark(text: str, final: str) -> str:
    """`text` up to the mark; where the template trimmed the message, without trailing spaces."""
    tag = CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise InvalidRequestError(
            "continue_final_message is set, but the model's chat template drops the final message; leave it unset",
            param="continue_final_message",
        )
    begin = text.rindex(tag)
    if text[begin : begin + len(CONTINUE_TAG)] == CONTINUE_TAG:
        return text[:begin]
    return text[:begin].rstrip()
