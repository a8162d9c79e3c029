"""Chats with tools for templates that know none: the tools and their calls written into the messages' text.

The form is that of Hermes, which most models have seen.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

PREAMBLE = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
    'tags:\n<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""Qwen's words."""


def shown_by(
    template: str, messages: Sequence[Message], tools: Sequence[Message]
) -> tuple[Sequence[Message], Sequence[Message] | None]:
    """Messages and tools as a chat template can show them."""
    if "tool_calls" not in template:  # it shows no calls that were made
        messages = _plain(messages)
    if tools and "tools" not in template:
        return with_tools(messages, tools), None
    return messages, tools or None


def with_tools(messages: Sequence[Message], tools: Sequence[Message]) -> list[Message]:
    """The messages with the tools written into the system's, or into one before them."""
    text = PREAMBLE.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls written as the assistant's text.

    Their results, with what the user says behind them, are one message of the user's: templates may want turns.
    """
    found: list[Message] = []
    for message, before in zip(messages, [{"role": ""}, *messages], strict=False):
        own = _written(message)
        if before["role"] == "tool" and own["role"] == "user":
            own = {**own, "content": f"{found.pop()['content']}\n{own['content']}"}
        found.append(own)
    return found


def _written(message: Message) -> Message:
    """A message without the fields of calls."""
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    if not message.get("tool_calls"):
        return {**kept, "content": content}
    calls = (json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
    written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return {**kept, "content": f"{content}\n{written}".lstrip("\n")}
