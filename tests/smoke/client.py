"""Sends one request and gathers its answer, or says why there is none."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.smoke.mix import Asked


class FailedRequestError(Exception):
    """No whole answer came; the message says what did."""


@dataclass(slots=True)
class Choice:
    """One of the n answers."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float | None] = field(default_factory=list)
    prompt_logprobs: Any = None

    def add(self, piece: dict[str, Any]) -> None:
        """Append a piece of a stream, or all there is."""
        self.token_ids += piece.get("token_ids") or []
        self.text += piece["text"]
        self.finish_reason = piece["finish_reason"] or self.finish_reason
        self.logprobs += (piece.get("logprobs") or {}).get("token_logprobs", [])
        self.prompt_logprobs = piece.get("prompt_logprobs") or self.prompt_logprobs


@dataclass(slots=True)
class Answer:
    """All choices, and the usage."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    def add(self, chunk: dict[str, Any]) -> None:
        """Take in a chunk."""
        if "error" in chunk:
            raise FailedRequestError(chunk["error"]["message"])
        self.usage = chunk.get("usage") or self.usage
        for piece in chunk["choices"]:
            self.choices.setdefault(piece["index"], Choice()).add(piece)


async def ask(client: httpx.AsyncClient, asked: Asked) -> Answer | None:
    """The answer; None where the client leaves. Raises FailedRequestError."""
    try:
        return await _ask(client, asked)
    except httpx.HTTPError as error:
        raise FailedRequestError(f"{type(error).__name__}: {error}") from error


async def _ask(client: httpx.AsyncClient, asked: Asked) -> Answer | None:
    answer, ended, chunks = Answer(), not asked.body["stream"], 0
    async with client.stream("POST", "/v1/completions", json=asked.body) as response:
        if response.status_code != 200:
            raise FailedRequestError(f"{response.status_code}: {(await response.aread()).decode()}")
        if ended:
            answer.add(json.loads(await response.aread()))
        async for line in response.aiter_lines() if not ended else _nothing():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                answer.add(json.loads(line[6:]))
                chunks += 1
                if chunks == asked.leaves:
                    return None
    if not ended or len(answer.choices) != asked.body.get("n", 1):
        raise FailedRequestError(f"the stream ended early, with {len(answer.choices)} choices")
    if any(choice.finish_reason is None for choice in answer.choices.values()):
        raise FailedRequestError("a choice has no finish_reason")
    return answer


async def _nothing():
    for line in ():
        yield line


TOLERANCE = 2e-3
"""Of log probabilities: they are made beside other rows, from the same logits."""


def difference(one: Answer, other: Answer, *, logprobs: bool = True) -> str | None:
    """How two answers to the same request differ; None where they do not. logprobs: whether these count too."""
    for index, mine in one.choices.items():
        theirs = other.choices[index]
        for name in ("token_ids", "text", "finish_reason"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"choice {index}, {name}: {getattr(mine, name)!r} and {getattr(theirs, name)!r}"
        if logprobs and not (
            _near(mine.logprobs, theirs.logprobs) and _near(mine.prompt_logprobs, theirs.prompt_logprobs)
        ):
            return f"choice {index}: other log probabilities"
    return None


def _near(one: Any, other: Any) -> bool:
    """Equal but for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= TOLERANCE
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    return bool(one == other)
