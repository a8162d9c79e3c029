"""A request of /v1/messages as the chat request of the same meaning."""

import json
from collections.abc import ItemsView, Mapping, Sequence
from typing import Any

from kvrail.services.router.errors import refuse
from kvrail.services.router.messages.schema import (
    Block,
    MessagesRequest,
    Prompted,
    RedactedThinking,
    TextBlock,
    Thinking,
    ToolChoice,
    ToolResult,
    ToolUse,
    TurnMessage,
)
from kvrail.services.router.openai.renaming import Rename, as_chat
from kvrail.services.router.plan import fields
from kvrail.services.router.plan.encoding import NO_THINKING
from kvrail.services.router.schema import ChatRequest
from kvrail.services.router.values import Json

ANTHROPICS: Mapping[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "fallback_credit_token": (None,),
    "fallbacks": (None, []),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "speed": (None, "standard"),
    "thread": (None,),
}
"""Anthropic's fields that change the answer and are not supported; values with which they would not."""
HARMLESS = frozenset(
    {
        "betas",
        "billing_policy",
        "cache_control",
        "context_management",
        "diagnostics",
        "stream_options",
        "user",
        "user_profile_id",
        "workspace_id",
    }
)
"""Anthropic's fields that are known, and taken without an effect on the answer; docs/api.md says why of each."""
BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a block of a system prompt that is for Anthropic alone; it changes, and the prefix would with it."""
PASSED = (
    "bad_words",
    "cache_salt",
    "chat_template_kwargs",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "priority",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
)
"""Fields of the chat API that are taken here too."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(ChatRequest.model_fields.keys() - {*MessagesRequest.model_fields, *PASSED, *HARMLESS}, (None,)),
    **fields.BOTH,
    **fields.CHAT,
    **ANTHROPICS,
}
"""What is refused, and values that ask for nothing: chats' fields that have another name here or none, too."""
NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
}


def chat_request(request: Prompted) -> tuple[ChatRequest, Rename]:
    """The chat, and how its errors are renamed; InvalidRequestError names the request's own parameter."""
    _refuse_unsupported(request)
    messages: list[Json] = []
    sources: list[int] = []  # of each message, the request's message that it is made of
    if request.system is not None:
        messages.append({"role": "system", "content": _system(request.system)})
        sources.append(-1)
    for place, turn in enumerate(request.messages):
        found = _messages(turn, place)
        messages += found
        sources += [place] * len(found)
    body: Json = {"model": request.model, "messages": messages, **_tools(request), **_output(request)}
    if request.messages[-1].role == "assistant":  # its beginning is given, and the model goes on from there
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    body |= {name: value for name, value in _extras(request) if name in PASSED}
    options = body.get("chat_template_kwargs") or {}
    if request.thinking and request.thinking.type == "disabled" and isinstance(options, dict):
        body["chat_template_kwargs"] = {**NO_THINKING, **options}
    if isinstance(request, MessagesRequest):
        body |= _generating(request)

    def rename(param: str) -> str:
        name, _, rest = param.partition(".")
        place, _, inner = rest.partition(".")
        if name == "messages" and place.isdecimal():
            source = sources[int(place)]
            return "system" if source < 0 else ".".join(filter(None, (name, str(source), inner)))
        if name in ("tools", "tool_choice"):
            rest = rest.replace("function.parameters", "input_schema").replace("function.", "")
        if name == "response_format":
            own = "output_format" if request.output_format else "output_config.format"
            return ".".join(filter(None, (own, rest.removeprefix("json_schema").removeprefix("."))))
        return ".".join(filter(None, (NAMES.get(name, name), rest)))

    return as_chat(body, rename)


def _generating(request: MessagesRequest) -> Json:
    optional = {
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
        "kvrail": request.kvrail and request.kvrail.model_dump(exclude_unset=True),
    }
    return {"max_completion_tokens": request.max_tokens, **{k: v for k, v in optional.items() if v is not None}}


def _output(request: Prompted) -> Json:
    """A chat's form of what is asked of the output."""
    config = request.output_config
    form = request.output_format or (config and config.format)
    found: Json = {}
    if form:
        described = {"name": "output", "schema": form.schema_, "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": described}
    if config and config.effort:
        found["reasoning_effort"] = config.effort
    return found


def _refuse_unsupported(request: Prompted) -> None:
    extras = {name: value for name, value in _extras(request) if name not in (*PASSED, *HARMLESS)}
    fields.refuse_extras(extras, REFUSED)
    if isinstance(request, MessagesRequest) and request.kvrail is not None and request.kvrail.provisional:
        refuse("kvrail.provisional", "only for /v1/chat/completions and /v1/completions")


def _extras(request: Prompted) -> ItemsView[str, Any]:
    """Fields that Anthropic's API does not have."""
    return (request.model_extra or {}).items()


def _system(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return _text([block for block in content if not block.text.startswith(BILLING_HEADER)])


def _text(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _messages(turn: TurnMessage, place: int) -> list[Json]:
    """The chat messages of a turn: what tools answered, then the turn's text, reasoning and calls."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts, thoughts, calls, results = [], [], [], []
    for i, block in enumerate(turn.content):
        _check_speaker(turn.role, block, f"messages.{place}.content.{i}.type")
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, RedactedThinking):
            continue
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
    message: Json = {"role": turn.role}
    if texts or not (calls or results):
        message["content"] = _text(texts)
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [*results, message] if len(message) > 1 else results


def _check_speaker(role: str, block: Block, param: str) -> None:
    """Raise InvalidRequestError for a block that a message of this role cannot have."""
    if not isinstance(block, TextBlock) and role != ("user" if isinstance(block, ToolResult) else "assistant"):
        refuse(param, f"{block.type} is nothing that a {role} says")


def _tools(request: Prompted) -> Json:
    """A chat's form of the tools and of the choice among them."""
    found: Json = {}
    if request.tools is not None:
        found["tools"] = [_tool(place, tool) for place, tool in enumerate(request.tools)]
    choice = request.tool_choice
    if choice is not None:
        found["tool_choice"] = _choice(choice)
        if choice.disable_parallel_tool_use is not None:
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return found


def _choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            refuse("tool_choice.name", "field required; name the tool")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _tool(place: int, tool: Any) -> Json:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else tool
    if not isinstance(tool, Mapping) or kind not in ("custom", None):
        refuse(f"tools.{place}.type", f"{str(kind)[:80]!r} is no tool that this server has; send your own")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}
