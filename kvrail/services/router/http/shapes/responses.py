"""Answers of /v1/responses and the paths below it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvrail.services.router.http.shapes.base import Shape
from kvrail.services.router.http.shapes.openai import KvrailUsage, Logprob, PromptDetails


class OutputText(Shape):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Logprob]


class OutputMessage(Shape):
    """A message of the model's."""

    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Shape):
    """A call of a function; arguments: JSON."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class OutputReasoningText(Shape):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Shape):
    """Reasoning of the model's."""

    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[OutputReasoningText]


class IncompleteDetails(Shape):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseError(Shape):
    """Why a response failed."""

    code: str
    message: str


class InputDetails(PromptDetails):
    """Counts of the prompt's tokens."""

    cache_write_tokens: int


class OutputDetails(Shape):
    """Counts of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Shape):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    kvrail: KvrailUsage


class ResponseObject(Shape):
    """A response: what was asked for, what came of it. Times are Unix seconds."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class Deleted(Shape):
    """A response that is kept no more."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Shape):
    """Tokens of an input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemPage(Shape):
    """A part of the input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
