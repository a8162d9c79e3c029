"""Answers of /v1/messages and the path below it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvrail.services.router.http.shapes.base import Shape
from kvrail.services.router.http.shapes.openai import KvrailUsage


class TextBlockShape(Shape):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any]


class ToolUseShape(Shape):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, str]


class ThinkingShape(Shape):
    """Reasoning."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnthropicUsage(Shape):
    """Counts of tokens; those of the prompt that were cached are apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: dict[str, int]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    server_tool_use: None
    service_tier: str
    speed: Literal["standard"]
    inference_geo: None
    kvrail: KvrailUsage


class AnthropicMessage(Shape):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextBlockShape | ToolUseShape | ThinkingShape, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: AnthropicUsage


class Counted(Shape):
    """Tokens of a chat."""

    input_tokens: int


class ModelInfo(Shape):
    """A name of the served model; max_input_tokens: null while no worker takes requests."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None


class ModelPage(Shape):
    """All names of the served model."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str
    last_id: str
