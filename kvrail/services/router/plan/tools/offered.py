"""The tools that a request offers, what it wants of them, and the grammar of their calls."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvrail.grammar.texts import Part, from_schema, literal
from kvrail.services.router.errors import refuse
from kvrail.services.router.plan.structured import OutputFormat
from kvrail.services.router.plan.tools.forms import CallForm
from kvrail.services.router.schema import ChatRequest

MAX_TOOLS = 128
"""OpenAI's bound."""
MAX_CALLS = 32
"""Calls that one constrained output makes at most."""
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,64}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """One function. number: of its tool in the request."""

    number: int
    name: str
    parameters: Any
    strict: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request.

    shown: as the template gets them. functions: those that may be called. must_call: the output is calls and no text.
    parallel: whether an output may have several calls.
    """

    shown: tuple[dict[str, Any], ...]
    functions: tuple[Function, ...]
    must_call: bool
    parallel: bool


def offer_of(request: ChatRequest) -> Offer | None:
    """What `request` offers; None where it offers nothing or wants nothing called. Errors name the parameter."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            refuse("tool_choice", "needs tools; send some, or leave it out")
        return None
    functions = functions_of(request.tools)
    wanted = _wanted(choice, [function.name for function in functions])
    if wanted == "none":
        return None
    chosen = [each for each in functions if wanted in ("auto", "required") or each.name == wanted[1:]]
    parallel = request.parallel_tool_calls is not False and wanted in ("auto", "required")
    return Offer(tuple(request.tools), tuple(chosen), wanted != "auto", parallel)


def functions_of(tools: Sequence[Any]) -> list[Function]:
    """The functions that `tools` describe; InvalidRequestError names the parameter."""
    if len(tools) > MAX_TOOLS:
        refuse("tools", f"has {len(tools)} entries, more than {MAX_TOOLS}")
    functions = [_function(i, tool) for i, tool in enumerate(tools)]
    names = [function.name for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            refuse(f"tools.{i}.function.name", f"{name!r} is the name of an earlier one; names must differ")
    return functions


def call_rules(offer: Offer, form: CallForm, mark: str, *, text: bool) -> tuple[str, dict[str, Part]]:
    """Lark rules for `calls`, written as the model writes them, and the grammars of the arguments that they name.

    mark: what opens a call, as Lark writes it. text: whether text may stand before and behind the calls. BEGIN is then
    an output without calls, and AFTER what follows them: neither has anything that would be read as a call.
    """
    rules, parts = [], {}
    if text:
        rules, mark = _text_rules(form, mark), "trigger"
    for i, function in enumerate(offer.functions):
        head = literal(f'{{"name": "{function.name}", "{form.arguments}": ')
        rules.append(f'object_{i}: {head} @arguments_{i} "}}"')
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        make = partial(from_schema, schema, lenient=not function.strict)
        parts[f"arguments_{i}"] = OutputFormat(f"tools.{function.number}.function.parameters", make, schema).part()
    call = " | ".join(f"object_{i}" for i in range(len(offer.functions)))
    between = "" if text and not (form.listed or form.bare) else literal(form.between)
    more = f"({between} call){{0,{MAX_CALLS - 1}}}" if offer.parallel else ""
    if form.listed:
        rules += [f"call: {call}", f'calls: {mark} "[" call {more} "]"']
    elif form.bare:
        rules += [f"call: {call}", f"calls: {'trigger? ' if text else ''}call {more}"]
    else:
        rules += [f'call: {mark} "\\n" ({call}) {literal(chr(10) + form.closes)}', f"calls: call {more}"]
    return "\n".join(rules), parts


def _text_rules(form: CallForm, mark: str) -> list[str]:
    """Rules for the text around calls; `trigger` is text up to a mark."""
    plain = f"/(.|\\n)*/ & ~/(.|\\n)*{re.escape(form.opens)}(.|\\n)*/"
    begin = " & ~/\\s*\\{(.|\\n)*/" if form.bare else ""
    after = " & ~/[\\s,;\\]]*\\{(.|\\n)*/" if form.bare or form.listed else ""
    lazy = "" if mark.startswith("<") else "[lazy]"  # a special token ends the text by itself
    return [f"trigger{lazy}: BEGIN {mark}", f"BEGIN: {plain}{begin}", f"AFTER: {plain}{after}"]


def _function(i: int, tool: Any) -> Function:
    place = f"tools.{i}"
    if not isinstance(tool, dict) or tool.get("type") != "function":
        refuse(f"{place}.type", 'only tools of type "function" are known here')
    described = tool.get("function")
    if not isinstance(described, dict):
        refuse(f"{place}.function", "field required; describe the function")
    name, parameters = described.get("name"), described.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(f"{place}.function.name", "must be 1 to 64 letters, digits, underscores, dots and dashes")
    if parameters is not None and not isinstance(parameters, dict):
        refuse(f"{place}.function.parameters", "must be a JSON schema, an object")
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{place}.function.strict", f"is {strict!r}; send true or false")
    return Function(i, name, parameters, bool(strict))


def _wanted(choice: Any, names: list[str]) -> str:
    """auto, none, required, or a function's name behind an equals sign."""
    match choice:
        case None:
            return "auto"
        case "auto" | "none" | "required":
            return str(choice)
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                refuse("tool_choice.function.name", f"{name[:64]!r} is none of the tools; they are {', '.join(names)}")
            return f"={name}"
    refuse("tool_choice", 'choose auto, none, required or {"type": "function", "function": {"name": …}}')
