"""Requests of /v1/messages, as strict and bounded as the other APIs' (kvrail/services/router/schema.py)."""

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from kvrail.services.router.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    Count,
    Items,
    KvrailOptions,
    Name,
    OpenBody,
    Options,
    StopString,
    TopP,
    Wire,
    kind_of,
    not_longer,
)
from kvrail.wire.convert import MAX_STOPS, UINT32_MAX


class TextBlock(Wire):
    """Text. What is said of caching is not needed: prefixes are always kept."""

    type: Literal["text"]
    text: str


class ToolUse(Wire):
    """A call of a tool that a model wrote."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Options


class ToolResult(Wire):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[TextBlock], Field(fail_fast=True), not_longer(MAX_PARTS)] | None = None
    is_error: bool | None = None


class Thinking(Wire):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Wire):
    """Reasoning of another server's model, encrypted; the model does not see it."""

    type: Literal["redacted_thinking"]
    data: str | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")],
    Discriminator(lambda value: str(kind_of(value))),
]


class TurnMessage(Wire):
    """One turn."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Block], Field(fail_fast=True), not_longer(MAX_PARTS)]


class ToolChoice(Wire):
    """Which tools are called: any or none as the model likes, at least one, one that is named, none."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Wire):
    """Whether the model reasons first. The budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class OutputFormat(Wire):
    """The schema that the text must match."""

    type: Literal["json_schema"]
    schema_: Annotated[Options, Field(alias="schema")]


class OutputConfig(Wire):
    """What is asked of the output; effort: the chat template gets it."""

    format: OutputFormat | None = None
    effort: Name | None = None


class Prompted(OpenBody):
    """What makes the prompt; body of /v1/messages/count_tokens."""

    model: Name | None = None
    messages: Annotated[list[TurnMessage], Field(min_length=1, fail_fast=True), not_longer(MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True), not_longer(MAX_PARTS)] | None = None
    tools: Items | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class Metadata(Wire):
    """Who asks."""

    user_id: Name | None = None


class MessagesRequest(Prompted):
    """Body of /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = None
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True), not_longer(MAX_STOPS)] | None = None
    metadata: Metadata | None = None
    service_tier: Name | None = None
    # ours
    kvrail: KvrailOptions | None = None
