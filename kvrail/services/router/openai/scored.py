"""Log probabilities of a prompt's tokens, as OpenAI's completions echo them and as vLLM lists them."""

from collections.abc import Sequence
from itertools import islice

from kvrail.services.router.openai.logprobs import TokenTexts, bounded, likely_texts
from kvrail.services.router.values import Json
from kvrail.text import IncrementalDetokenizer
from kvrail.values.sampling import PromptLogprobs


class ScoredPrompt:
    """The prompt of one choice, and what has come of its log probabilities; token 0 has none, since it follows nothing.

    text: what `echo` shows of it.
    """

    def __init__(self, texts: TokenTexts, token_ids: Sequence[int], text: str = "") -> None:
        self._texts = texts
        self._token_ids = token_ids
        self._text = text
        self._found: list[PromptLogprobs] = []
        self._reader = IncrementalDetokenizer(texts.tokenizer, (), skip_special_tokens=False)
        self._offset = self._shown = 0

    def add(self, found: PromptLogprobs) -> None:
        """Keep the next ones for `entries` and `lists`."""
        self._found.append(found)

    def entries(self, top: int) -> list[Json | None]:
        """The form of vLLM: null, then for each token an object by token id: itself and the `top` most likely."""
        entries: list[Json | None] = [None]
        for found in self._found:
            for place, (logprob, rank) in enumerate(zip(found.logprobs, found.ranks, strict=True)):
                own = self._token_ids[found.first + place]
                entry = {str(own): self._entry(own, logprob, rank)}
                for number, (token_id, value) in enumerate(islice(found.most_likely(place), top), start=1):
                    entry.setdefault(str(token_id), self._entry(token_id, value, number))
                entries.append(entry)
        return entries

    def _entry(self, token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": bounded(logprob), "rank": rank, "decoded_token": self._texts.text(token_id)}

    def lists(self, top: int) -> list[Json]:
        """The form of OpenAI: parallel lists, in parts that follow on one another. Once, and not beside `echo`."""
        return [self.echo(found, top)[1] for found in self._found]

    def echo(self, found: PromptLogprobs, top: int) -> tuple[str, Json]:
        """The text of the tokens of `found`, and their lists; with the first ones comes token 0."""
        end = found.first + len(found.logprobs)
        ids = self._token_ids[0 if found.first == 1 else found.first : end]
        tokens = [self._texts.text(token_id) for token_id in ids]
        offsets = [self._advance(token_id) for token_id in ids]
        before = [None] * (len(ids) - len(found.logprobs))
        likely = [
            likely_texts(self._texts, token, logprob, islice(found.most_likely(place), top))
            for place, (token, logprob) in enumerate(zip(tokens[len(before) :], found.logprobs, strict=True))
        ]
        shown = len(self._text) if end == len(self._token_ids) else self._offset
        text, self._shown = self._text[self._shown : shown], shown
        return text, {
            "tokens": tokens,
            "token_logprobs": [*before, *map(bounded, found.logprobs)],
            "top_logprobs": [*before, *likely],
            "text_offset": offsets,
        }

    def _advance(self, token_id: int) -> int:
        """Where in the text the next token begins. A special token that the text does not show takes no place in it."""
        offset, said = self._offset, self._reader.push((token_id,))
        hidden = token_id in self._texts.tokenizer.special_ids and not self._text.startswith(said, offset)
        if not hidden:
            self._offset = min(offset + len(said), len(self._text))
        return offset
