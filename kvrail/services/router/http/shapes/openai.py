"""Answers of OpenAI's older APIs."""

from typing import Any, Literal

from kvrail.services.router.http.shapes.base import Shape


class PromptDetails(Shape):
    """Counts of the prompt's tokens."""

    cached_tokens: int


class KvrailUsage(Shape):
    """Where the KV came from, its bytes on the wire and before encoding, and where the time went, in seconds."""

    prefill_worker: str | None
    codec: str | None
    transport: str | None
    reason: str | None
    codec_reason: str | None
    lossy: bool
    kv_cache: str
    exact: bool
    invariant: bool
    kv_bytes: int
    kv_raw_bytes: int
    exposed_transfer_seconds: float
    drafts_proposed: int
    drafts_accepted: int
    stage_seconds: dict[str, float]
    trace: dict[str, Any] | None = None


class Usage(Shape):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: dict[str, int] | None = None
    kvrail: KvrailUsage


class TopLogprob(Shape):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TopLogprob):
    """A token of the output, and the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class PromptLogprob(Shape):
    """A token at a place of the prompt; rank: 1 for the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


class ChatLogprobs(Shape):
    """Log probabilities of a choice."""

    content: list[Logprob]
    refusal: None


class CalledFunction(Shape):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]
    audio: None
    tool_calls: list[ToolCall]
    reasoning: str | None
    reasoning_content: str | None


class Ending(Shape):
    """How a choice ended; stop_reason: the stop string or the token id, where one ended it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatChoice(Ending):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class Enveloped(Shape):
    """What every object of a generation has; created: Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    service_tier: str
    kv_transfer_params: None


class ChatCompletion(Enveloped):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


class CompletionLogprobLists(Shape):
    """Parallel lists over tokens; text_offset: in characters from the text's start."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending):
    """One continuation."""

    text: str
    logprobs: CompletionLogprobLists | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None


class Completion(Enveloped):
    """Whole continuations of prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
