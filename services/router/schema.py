"""Requests of the HTTP API: OpenAI's fields, vLLM's extensions, and `kvrail`.

Types are strict: "5" is no number and true no integer. Fields that are unknown here are accepted and have no effect, as
with OpenAI; what would change the answer if it were honoured, but is not supported, is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kvrail.wire.convert import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION,
    MIN_REPETITION,
    UINT32_MAX,
    UINT64_MAX,
)

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_PROMPTS = 128
MAX_TEMPERATURE = 2.0
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_as_part(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=1, le=UINT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Wire(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow")


class TextPart(Wire):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Wire):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_text_as_part)] = None
    name: str | None = None
    tool_calls: list[Any] | None = None

    def plain(self) -> dict[str, str]:
        """Role and content for the chat template; `developer` is OpenAI's newer word for `system`."""
        fields: dict[str, str] = {"role": "system" if self.role == "developer" else self.role}
        fields["content"] = "\n".join(part.text for part in self.content or [])
        if self.name is not None:
            fields["name"] = self.name
        return fields


class StreamOptions(Wire):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KvrailOptions(Wire):
    """Our own extension of a request.

    codec: how the KV crosses, one that the workers know, or auto. provisional: whether a stream also shows tokens
    that are drafted on a coarse KV, before they are verified (docs/provisional-streaming.md). trace: whether the usage
    also tells what each process did when (`kvrail trace` draws it).
    """

    codec: Annotated[str, Field(max_length=64)] = ""
    provisional: bool = False
    trace: bool = False


class Request(Wire):
    """Fields of chat and completion requests alike."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    stop: Annotated[list[StopString] | None, Field(max_length=MAX_STOPS), BeforeValidator(_one_as_list)] = None
    seed: Annotated[int, Field(ge=-(1 << 63), le=UINT64_MAX)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=UINT32_MAX)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # ours
    kvrail: KvrailOptions | None = None

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"key {key[:20]!r} is no token id")
        return value

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk of the stream brings the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk brings the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[Any] | None = None
    audio: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Request):
    """Body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
    max_tokens: Count | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """One prompt becomes a list of one; the kind of the first element decides what is expected of the others."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if type(value[0]) is int:
            for i, item in enumerate(value):
                if type(item) is not int or not 0 <= item <= UINT32_MAX:
                    raise ValueError(f"element {i} is no token id")
            value = [value]
        kind = type(value[0])
        if kind not in (str, list) or any(type(item) is not kind for item in value):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        return value


class TokenizeRequest(Wire):
    """Body of /tokenize, as in vLLM: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Body of /detokenize, as in vLLM."""

    model: str | None = None
    tokens: list[TokenId]
