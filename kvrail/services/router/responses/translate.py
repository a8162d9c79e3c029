"""A request of /v1/responses as the chat request of the same meaning."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrail.services.router.errors import refuse
from kvrail.services.router.openai.renaming import Rename, as_chat
from kvrail.services.router.responses.schema import (
    FunctionCall,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    InputText,
    Part,
    Reasoning,
    ResponsesRequest,
    TextOptions,
)
from kvrail.services.router.schema import ChatRequest, Sampled
from kvrail.services.router.values import Json

LOGPROBS = "message.output_text.logprobs"
TAKEN_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Reasoning comes in the clear, so its encrypted form is never missing."""
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of the chat request, and what they are called here."""
REFUSED = {
    "conversation": "this server keeps responses, but no conversations; send previous_response_id",
    "prompt": "this server keeps no prompt templates; send the text itself as input",
    "access_programs": "not supported by this server; leave it out",
    "background_options": "this server answers while the client waits; leave it out",
    "image": "this server knows no images; leave it out",
    "n": "a response has one output; send several requests",
    "response_format": "is called text.format here",
    "messages": "is called input here",
    "max_tokens": "is called max_output_tokens here",
    "max_completion_tokens": "is called max_output_tokens here",
    "include_reasoning": "reasoning is an item of the output here; leave it out",
    "enable_response_messages": "not supported by this server; read the response's input_items",
    "previous_input_messages": "not supported by this server; send them as input",
    "return_token_ids": "only for /v1/chat/completions and /v1/completions",
    "return_tokens_as_token_ids": "only for /v1/chat/completions and /v1/completions",
    "logprob_token_ids": "only for /v1/chat/completions and /v1/completions",
    "prompt_logprobs": "only for /v1/chat/completions and /v1/completions",
}
REFUSED_VALUES = {
    "background": "this server answers while the client waits; leave it out, or set stream to true",
    "max_tool_calls": "this server runs no tools by itself; leave it out",
    "stream_options.include_obfuscation": "not supported by this server; leave it out",
    "kvrail.provisional": "only for /v1/chat/completions and /v1/completions",
}


def chat_request(request: ResponsesRequest, history: Sequence[InputItem]) -> tuple[ChatRequest, Rename]:
    """The chat of `history` and the request's input, and how its errors are renamed.

    InvalidRequestError names the request's own parameter.
    """
    _refuse_unsupported(request)
    messages, origins = _turns(request, history)

    def rename(param: str) -> str:
        name, _, rest = param.partition(".")
        place, _, inner = rest.partition(".")
        if name == "messages" and place.isdecimal():
            origin = origins[int(place)]
            return f"{origin}.{inner}" if inner and origin.startswith("input.") else origin
        if name == "response_format":
            rest = rest.removeprefix("json_schema").removeprefix(".")
        return ".".join(filter(None, (NAMES.get(name, name), rest)))

    return as_chat(_body(request, messages), rename)


def _turns(request: ResponsesRequest, history: Sequence[InputItem]) -> tuple[list[Json], list[str]]:
    """The chat's messages, and the parameter that each of them is of."""
    messages: list[Json] = []
    origins: list[str] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
        origins.append("instructions")
    before: InputItem | None = None
    for place, item in enumerate([*history, *input_items(request)], -len(history)):
        if isinstance(item, Reasoning) and not item.content:
            continue
        message = _message(item)
        if messages and _joins(messages[-1], message, before, item):
            _join(messages[-1], message)
        else:
            messages.append(message)
            own = "input" if isinstance(request.input, str) else f"input.{place}"
            origins.append("previous_response_id" if place < 0 else own)
        before = item
    return messages, origins


def _body(request: ResponsesRequest, messages: list[Json]) -> Json:
    """The chat's body."""
    given = {name: getattr(request, name) for name in Sampled.model_fields if name in request.model_fields_set}
    if request.kvrail is not None:
        given["kvrail"] = request.kvrail.model_dump(exclude_unset=True)
    optional = {
        "max_completion_tokens": request.max_output_tokens,
        "tools": None if request.tools is None else [_tool(i, tool) for i, tool in enumerate(request.tools)],
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "response_format": _response_format(request.text),
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if LOGPROBS in (request.include or ()):
        optional |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    set_fields = {name: value for name, value in optional.items() if value is not None}
    return {**(request.model_extra or {}), **given, "messages": messages, **set_fields}


def input_items(request: ResponsesRequest) -> list[InputItem]:
    """The request's input as items."""
    if isinstance(request.input, str):
        return [InputMessage(role="user", content=request.input)]
    return request.input


def _refuse_unsupported(request: ResponsesRequest) -> None:
    for name, why in REFUSED.items():
        value = (request.model_extra or {}).get(name)
        if value is not None and value is not (name == "include_reasoning"):  # true asks for nothing there, else false
            refuse(name, why)
    asked = {
        "background": request.background,
        "max_tool_calls": request.max_tool_calls,
        "stream_options.include_obfuscation": request.stream_options and request.stream_options.include_obfuscation,
        "kvrail.provisional": request.kvrail and request.kvrail.provisional,
    }
    for name, value in asked.items():
        if value:
            refuse(name, REFUSED_VALUES[name])
    for i, name in enumerate(request.include or ()):
        if name not in TAKEN_INCLUDES:
            refuse(f"include.{i}", f"{name[:80]!r} is nothing that this server has; it takes {LOGPROBS}")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        refuse("top_logprobs", f"only with {LOGPROBS!r} in include")


def _text(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)


def _message(item: InputItem) -> Json:
    """The chat message of an item."""
    if isinstance(item, InputMessage):
        return {"role": item.role, "content": _text(item.content)}
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if isinstance(item, FunctionCallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    assert isinstance(item, Reasoning)  # what references name has taken their place
    return {"role": "assistant", "reasoning_content": "\n".join(part.text for part in item.content or ())}


def _joins(last: Json, message: Json, before: InputItem | None, item: InputItem) -> bool:
    """Whether an item continues the assistant's turn that the item before it is of: reasoning, text, then calls."""
    if last["role"] != "assistant" or message["role"] != "assistant":
        return False
    if isinstance(item, FunctionCall):
        return True
    return isinstance(item, InputMessage) and not isinstance(before, InputMessage | FunctionCall)


def _join(last: Json, message: Json) -> None:
    calls = [*last.get("tool_calls", ()), *message.pop("tool_calls", ())]
    last.update(message)
    if calls:
        last["tool_calls"] = calls


def _tool(place: int, tool: Any) -> Json:
    """A chat's form of a tool."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        refuse(f"tools.{place}.type", f"{str(kind)[:80]!r} is no tool that this server has; send functions")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """A chat's form of the choice."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        refuse("tool_choice", 'choose auto, none, required or {"type": "function", "name": …}')
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(text: TextOptions | None) -> Json | None:
    """A chat's form of the text's format."""
    form = text.format if text else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.name is None or form.schema_ is None:
        refuse("text.format", "json_schema needs a name and a schema")
    described = {"name": form.name, "schema": form.schema_}
    optional = {"description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": described | {k: v for k, v in optional.items() if v is not None}}
