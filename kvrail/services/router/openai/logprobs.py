"""Log probabilities in the two shapes of the OpenAI API."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvrail.services.router.values import Delta
from kvrail.text import IncrementalDetokenizer, Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's value."""


def bounded(logprob: float) -> float:
    """A log probability as JSON can hold it."""
    return max(logprob, LOWEST)


class TokenTexts:
    """The name of a token in log probabilities: its text or, where a request asks for that, `token_id:` and its id.

    all_listed: show the log probabilities of all tokens that the request names, whichever token was drawn.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, all_listed: bool = False) -> None:
        self.tokenizer = tokenizer
        self.all_listed = all_listed
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        """The text of one token."""
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)

    def data(self, token_id: int) -> list[int]:
        """The bytes that the token stands for."""
        return list(self.tokenizer.token_bytes(token_id))


def chat_logprobs(texts: TokenTexts, delta: Delta) -> dict[str, Any]:
    """One entry a token: the token, its log probability and bytes, and the most likely ones at its position.

    As in vLLM, the token itself is the first of these, and there are as many as were asked for.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": bounded(logprob), "bytes": texts.data(token_id)}

    content = [
        {
            **entry(token_id, found.logprob),
            "top_logprobs": [entry(*pair) for pair in dict([(token_id, found.logprob), *found.top]).items()][
                : None if texts.all_listed else len(found.top)
            ],
        }
        for token_id, found in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds parallel lists over the tokens of one choice's output.

    Offsets are in characters from the start of the choice's text; the output begins at `offset`. prompt_ids: the
    prompt's tokens, behind which the output is read. skip_special: the text leaves special tokens out.
    """

    def __init__(self, texts: TokenTexts, offset: int, prompt_ids: Sequence[int], *, skip_special: bool) -> None:
        self._texts = texts
        self._offset = offset
        self._reader = IncrementalDetokenizer(texts.tokenizer, prompt_ids, skip_special)

    def take(self, delta: Delta) -> dict[str, Any]:
        """The lists for these tokens."""
        tokens = [self._texts.text(token_id) for token_id in delta.token_ids]
        offsets = []
        for token_id in delta.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._reader.push((token_id,)))  # of a character in several tokens, with its last one
        pairs = zip(tokens, delta.logprobs, strict=True)
        return {
            "tokens": tokens,
            "token_logprobs": [bounded(found.logprob) for found in delta.logprobs],
            "top_logprobs": [likely_texts(self._texts, token, found.logprob, found.top) for token, found in pairs],
            "text_offset": offsets,
        }


def likely_texts(
    texts: TokenTexts, token: str, logprob: float, likely: Iterable[tuple[int, float]]
) -> dict[str, float]:
    """`token` and the most likely ones at its position; of several with the same text, the most likely stays."""
    top = {token: bounded(logprob)}
    for token_id, value in likely:
        text = texts.text(token_id)
        top[text] = max(top.get(text, LOWEST), bounded(value))
    return top
