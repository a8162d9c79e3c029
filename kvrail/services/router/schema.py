"""Requests of the HTTP API: OpenAI's fields, vLLM's extensions, and `kvrail`.

Types are strict: "5" is no number and true no integer. Fields that are unknown here are accepted and have no effect, as
with OpenAI; what would change the answer if it were honoured, but is not supported, is refused by name.

Every list and object has a bound, and is refused at its first error: a body is checked while other requests wait.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)

from kvrail.values.kv_cache import Asked
from kvrail.wire.convert import (
    MAX_BIASES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MIN_REPETITION,
    UINT32_MAX,
    UINT64_MAX,
)

MAX_NAMED_KEYS = 20
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_ITEMS = 1024
MAX_FIELDS = 256
"""Most fields of an object of a body, known and unknown ones."""
MAX_TOKEN_IDS = 1 << 20
MAX_NAME_CHARS = 1024
MAX_ROLE_CHARS = 64
MAX_TEMPLATE_CHARS = 1 << 16
MAX_TEMPERATURE = 2.0
MAX_PROMPT_LOGPROBS = 1 << 17
"""Log probabilities of prompts that one answer may have: some 10 MB of JSON."""
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def named(keys: Sequence[str]) -> str:
    """Keys of an object as the subject of a message about them."""
    shown = ", ".join(repr(key[:20]) for key in keys[:MAX_NAMED_KEYS])
    more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
    return f"keys {shown}{more} are" if len(keys) > 1 else f"key {shown} is"


def _text_as_part(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def kind_of(value: Any) -> Any:
    """The `type` of an object of a body, parsed or validated: what distinguishes the members of a union."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def not_longer(most: int) -> BeforeValidator:
    """Refuses a longer list or object before it looks at what is in it."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise ValueError(f"has {len(value)} entries, more than {most}")
        return value

    return BeforeValidator(check)


def _biases(value: Any, handler: Callable[[Any], Any]) -> Any:
    """Token ids as text, and what is added to their logits; as many as a vocabulary has, so checked in one pass."""
    if not isinstance(value, dict):
        return handler(value)
    if len(value) > MAX_BIASES:
        raise ValueError(f"has {len(value)} entries, more than {MAX_BIASES}")
    wrong = [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= 10)]
    if wrong:
        raise ValueError(f"{named(wrong)} no token id")
    most = MAX_LOGIT_BIAS
    for key, bias in value.items():
        if type(bias) not in (int, float) or not -most <= bias <= most:
            raise ValueError(f"the bias of {key} must be a number from {-most:g} to {most:g}")
    return value


def _whole(value: Any) -> Any:
    """A whole number that is written with a point, such as 5.0, as an integer; JSON Schema takes it for one too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1, le=UINT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=UINT32_MAX)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS, allow_inf_nan=False)]
TokenIdKey = Annotated[str, Field(pattern="^[0-9]{1,10}$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), not_longer(MAX_TOKEN_IDS)]
Options = Annotated[dict[str, Any], not_longer(MAX_FIELDS)]
Items = Annotated[list[Any], not_longer(MAX_ITEMS)]

_TOKEN_IDS = TypeAdapter(TokenIds, config=ConfigDict(strict=True))
_PROMPT_KINDS = "must be a string, a list of strings, a list of token ids or a list of such lists"


class Wire(BaseModel):
    """Base of all bodies and their parts."""

    model_config = ConfigDict(strict=True)


class TextPart(Wire):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


class CalledFunction(Wire):
    """A function that an assistant called, with its arguments as JSON in a text."""

    name: Name
    arguments: str


class ToolCall(Wire):
    """One call in an assistant's message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """What the chat template gets: arguments as an object, as templates expect, where they are one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Message(Wire):
    """One message of a chat. Other roles than OpenAI's are the model's chat template's to take or to refuse."""

    role: Annotated[str, Field(min_length=1, max_length=MAX_ROLE_CHARS)]
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True), not_longer(MAX_PARTS)] | None,
        BeforeValidator(_text_as_part, json_schema_input_type=str | list[TextPart] | None),
    ] = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True), not_longer(MAX_ITEMS)] | None = None
    tool_call_id: Name | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thoughts(self) -> str | None:
        """The reasoning, under whichever of its two names it comes."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def plain(self) -> dict[str, Any]:
        """What the chat template gets; `developer` is OpenAI's newer word for `system`."""
        fields: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role}
        fields["content"] = "\n".join(part.text for part in self.content or [])
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                fields[key] = getattr(self, key)
        if self.thoughts is not None:
            fields |= {"reasoning": self.thoughts, "reasoning_content": self.thoughts}
        if self.tool_calls:
            fields["tool_calls"] = [call.plain() for call in self.tool_calls]
        return fields


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True), not_longer(MAX_MESSAGES)]


class StreamOptions(Wire):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class KvrailOptions(Wire):
    """Our own extension of a request.

    codec: how the KV crosses, one that the workers know, or auto. kv_cache: how decode workers keep it. provisional:
    whether a stream also shows tokens that are drafted on a coarse KV, before they are verified
    (docs/provisional-streaming.md). trace: whether the usage also shows what each process did when (`kvrail trace`).
    """

    codec: Annotated[str, Field(max_length=64)] = ""
    kv_cache: Asked = ""
    provisional: bool = False
    trace: bool = False


class OpenBody(Wire):
    """A body with a bounded number of fields, also such as are not ours: fields.py says what becomes of them."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields, more than {MAX_FIELDS}")
        return value


Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
TopK = Annotated[Whole, Field(ge=-1, le=UINT32_MAX)]
Repetition = Annotated[float, Field(ge=MIN_REPETITION, le=MAX_REPETITION)]


class Sampled(OpenBody):
    """Fields of every request that generates, except for Anthropic's."""

    model: Name | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stop: Annotated[
        Annotated[list[StopString], Field(fail_fast=True), not_longer(MAX_STOPS)] | None,
        BeforeValidator(_one_as_list, json_schema_input_type=StopString | list[StopString] | None),
    ] = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), le=UINT64_MAX)] | None = None
    logit_bias: Annotated[
        dict[str, float] | None, WrapValidator(_biases, json_schema_input_type=dict[TokenIdKey, Bias] | None)
    ] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: Name | None = None
    # vLLM's
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=UINT32_MAX)] | None = None
    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True), not_longer(MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Options | None = None
    bad_words: Annotated[list[StopString], Field(fail_fast=True), not_longer(MAX_STOPS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True), not_longer(MAX_BIASES)] | None = (
        None
    )
    # llama.cpp's
    json_schema: Any = None
    grammar: str | None = None
    # ours
    kvrail: KvrailOptions | None = None


class Request(Sampled):
    """Fields of chat and completion requests alike."""

    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = None
    response_format: Options | None = None
    # vLLM's
    prompt_logprobs: Annotated[Whole, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=UINT32_MAX)] | None = None
    logprob_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, fail_fast=True), not_longer(MAX_LOGPROB_TOKENS)] | None
    ) = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk of the stream brings the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk brings the usage so far; only beside the usage at the end, as with vLLM."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(Request):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Items | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Items | None = None
    function_call: Any = None
    modalities: Items | None = None
    audio: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: Options | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool | None = None
    documents: Annotated[list[Options], Field(fail_fast=True), not_longer(MAX_ITEMS)] | None = None


Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
)


class CompletionRequest(Request):
    """Body of /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], SkipValidation]  # `_as_list` has checked each element
    max_tokens: Annotated[Whole, Field(ge=0, le=UINT32_MAX)] | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before", json_schema_input_type=Prompts)
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Prompts as a list of texts or of token ids; the first element decides what is expected of the others."""
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise ValueError(_PROMPT_KINDS)
        if type(value[0]) is int:
            return [_token_ids(value, "element")]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"has {len(value)} prompts, more than {MAX_PROMPTS}; send them in several requests")
        kind = type(value[0])
        if kind not in (str, list) or any(type(item) is not kind for item in value):
            raise ValueError(_PROMPT_KINDS)
        return value if kind is str else [_token_ids(item, f"prompt {i}, element") for i, item in enumerate(value)]


def _token_ids(value: list[Any], element: str) -> list[int]:
    """`value` if all of it are token ids; ValueError otherwise, which calls an element of it `element`."""
    try:
        return _TOKEN_IDS.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{element} {first['loc'][0]} is no token id" if first["loc"] else why) from None


class TokenizeRequest(OpenBody):
    """Body of /tokenize, as in vLLM: a prompt, or messages and the tools that they are shown with."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Items | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)] | None = None
    chat_template_kwargs: Options | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Body of /detokenize, as in vLLM."""

    model: Name | None = None
    tokens: TokenIds
