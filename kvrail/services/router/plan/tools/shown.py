"""What an output says, in the shapes of OpenAI's chat messages and their deltas."""

from collections.abc import Sequence

from kvrail.services.router.plan.tools.forms import CallDelta, Said
from kvrail.services.router.values import Json


def shown_delta(said: Said) -> Json:
    """A delta of a stream; empty where nothing is said."""
    delta: Json = {}
    if said.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = said.reasoning
    if said.content:
        delta["content"] = said.content
    if said.calls:
        delta["tool_calls"] = [_call_delta(call) for call in said.calls]
    return delta


def join_calls(calls: list[Json], news: Sequence[CallDelta]) -> None:
    """Add news of calls to those of a whole message, in place."""
    for call in news:
        if call.id is not None:
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
        calls[call.index]["function"]["arguments"] += call.arguments


def whole_message(content: str, reasoning: str, calls: list[Json]) -> Json:
    """The assistant's message; one that calls tools and says nothing has no content.

    Keys without a value are null, as with vLLM and in OpenAI's types. Reasoning has vLLM's name and DeepSeek's.
    """
    return {
        "role": "assistant",
        "content": content if content or not calls else None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": calls,
        "reasoning": reasoning or None,
        "reasoning_content": reasoning or None,
    }


def _call_delta(call: CallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
