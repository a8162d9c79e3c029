"""Requests of /v1/responses, as strict and bounded as the other APIs' (kvrail/services/router/schema.py)."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvrail.services.router.schema import (
    MAX_ITEMS,
    MAX_MESSAGES,
    MAX_PARTS,
    Count,
    Items,
    Name,
    Options,
    Sampled,
    Wire,
    kind_of,
    not_longer,
)
from kvrail.wire.convert import MAX_LOGPROBS

MAX_METADATA = 16
MAX_METADATA_CHARS = 512


class InputText(Wire):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Refusal(Wire):
    """A refusal that a model once wrote; the model gets it as text."""

    type: Literal["refusal"]
    refusal: str


def _part_kind(value: Any) -> str:
    return "refusal" if kind_of(value) == "refusal" else "text"


Part = Annotated[Annotated[InputText, Tag("text")] | Annotated[Refusal, Tag("refusal")], Discriminator(_part_kind)]
Parts = Annotated[list[Part], Field(fail_fast=True), not_longer(MAX_PARTS)]


class InputMessage(Wire):
    """A message, the client's or one of an earlier response's output."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCall(Wire):
    """A call of a tool that a model wrote."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class FunctionCallOutput(Wire):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts


class ReasoningText(Wire):
    """A model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class Reasoning(Wire):
    """Reasoning of an earlier response; the model does not see a summary."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True), not_longer(MAX_PARTS)] | None = None


class ItemReference(Wire):
    """An item of a response that is kept, by its id."""

    type: Literal["item_reference"]
    id: Name


def _item_kind(value: Any) -> str:
    """The tag of an item; a message may go without its type."""
    kind = kind_of(value)
    return str(kind) if kind is not None else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_item_kind),
]
InputItems = Annotated[list[InputItem], Field(min_length=1, fail_fast=True), not_longer(MAX_MESSAGES)]


class TextFormat(Wire):
    """What the text must be: any, a JSON object, or one that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[Options | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Wire):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Wire):
    """What is asked of the reasoning."""

    effort: Name | None = None
    summary: Name | None = None


class ResponseStreamOptions(Wire):
    """How a stream is written."""

    include_obfuscation: bool | None = None


MetadataText = Annotated[str, Field(max_length=MAX_METADATA_CHARS)]


class ResponsesRequest(Sampled):
    """Body of /v1/responses."""

    input: str | InputItems
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: Annotated[dict[str, MetadataText], not_longer(MAX_METADATA)] | None = None
    include: Annotated[list[Name], Field(fail_fast=True), not_longer(MAX_ITEMS)] | None = None
    text: TextOptions | None = None
    tools: Items | None = None
    tool_choice: str | Options | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    chat_template_kwargs: Options | None = None
