"""Sampling parameters under the names of vLLM and of the HTTP API, and the check of requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pydantic import ValidationError

from kvrail.services.router.errors import from_validation
from kvrail.services.router.schema import DEFAULT_COMPLETION_TOKENS, CompletionRequest, Request

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one prompt. A wrong value raises InvalidRequestError, which names it.

    n: number of outputs. max_tokens: None: as many as the context has room for. temperature: 0 is greedy. top_k: 0 is
    off. seed: the same seed gives the same outputs; None: a random one for each prompt. stop: strings that end the
    output. logprobs: k returns the log probabilities of each token and of the k most likely ones; prompt_logprobs: the
    same for the prompt's tokens. structured_outputs: what the output must match: {"json": schema}, {"regex": pattern},
    {"choice": texts} or {"grammar": text} (docs/structured-output.md).
    """

    n: int = 1
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured_outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        read(CompletionRequest, {"prompt": "-", **self.body()})

    def body(self) -> dict[str, Any]:
        """The fields of a completion request."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
        if isinstance(self.logit_bias, Mapping):
            given["logit_bias"] = {str(key): bias for key, bias in self.logit_bias.items()}
        return given


def read(kind: type[R], body: dict[str, Any]) -> R:
    """A request of the HTTP API, checked as the router checks it; InvalidRequestError names the field that is wrong."""
    body = {"model": "", **body}
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
        raise from_validation(found, body) from None
