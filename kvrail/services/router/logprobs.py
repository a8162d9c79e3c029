"""Log probabilities in the two shapes of the OpenAI API."""

from typing import Any

from kvrail.sampling import TokenLogprobs
from kvrail.services.router.values import Delta
from kvrail.text import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's value."""


def _bounded(logprob: float) -> float:
    return max(logprob, LOWEST)


class TokenTexts:
    """What stands for a token in log probabilities: its text, or where a request wants that, `token_id:` and its id."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """One token's."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def data(self, token_id: int) -> list[int]:
        """The bytes that the token stands for."""
        return list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(texts: TokenTexts, delta: Delta) -> dict[str, Any]:
    """One entry a token: the token, its log probability and bytes, and the most likely ones at its position."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token_id),
            "logprob": _bounded(logprob),
            "bytes": texts.data(token_id),
        }

    content = [
        {**entry(token_id, found.logprob), "top_logprobs": [entry(*pair) for pair in found.top]}
        for token_id, found in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds parallel lists over the tokens of one choice; offsets are in characters from the output's start."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def take(self, delta: Delta) -> dict[str, Any]:
        """The lists for these tokens."""
        tokens = [self._texts.text(token_id) for token_id in delta.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        pairs = zip(tokens, delta.logprobs, strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": [_bounded(found.logprob) for found in delta.logprobs],
            "top_logprobs": [self._top(token, found) for token, found in pairs],
            "text_offset": offsets,
        }

    def _top(self, token: str, found: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the chosen one; of several with one text the most likely stays."""
        top: dict[str, float] = {}
        for token_id, logprob in found.top:
            top.setdefault(self._texts.text(token_id), _bounded(logprob))
        top.setdefault(token, _bounded(found.logprob))
        return top
