"""Token ids to text, piece by piece."""

import codecs
from collections.abc import Sequence

from kvrail.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_BYTES = 4  # a UTF-8 character has at most four bytes


class IncrementalDetokenizer:
    """Turns a growing sequence of token ids into text, in constant time a token.

    What `push` and `flush` return, joined, is what a full decode of prompt and output adds to that of the prompt, cut
    into pieces that never end inside a character. Text that was returned is not taken back: where a SentencePiece
    tokenizer's full decode would undo a valid character because malformed bytes follow it, the character stays.

    prompt_ids: the tokens before the output; they decide whether it has a leading space, and may end inside a
    character. skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        decoder = tokenizer.decoder
        self._utf8 = _PerByteUtf8() if decoder.per_byte else _MaximalPartUtf8()
        self._strip = decoder.strip
        self._first = True
        self._read_prompt(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next token ids; returns the text that they complete."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        """End the output; returns replacement characters for a character that was left unfinished."""
        return self._utf8.finish()

    def _push_one(self, token_id: int) -> str:
        if self._first:
            data = self._tokenizer.first_token_bytes(token_id)
            self._first = not self._tokenizer.has_token(token_id)
        else:
            data = self._tokenizer.token_bytes(token_id)
        while self._strip and data:
            if data[:1] != b" ":
                self._strip = 0
                break
            self._strip -= 1
            data = data[1:]
        return self._utf8.feed(data)

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Bring the state to the end of the prompt by its last few bytes and the first text it has, if any."""
        for token_id in prompt_ids:
            if token_id not in self._skipped and self._tokenizer.has_token(token_id):
                self._first = False
                if self._tokenizer.token_bytes(token_id):
                    self._strip = 0
                    break
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= CONTEXT_BYTES:
                break
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
        self._utf8.feed(tail)


# Both of these make characters of bytes: `feed` returns those that are complete, `finish` replacements for the rest.


class _MaximalPartUtf8:
    """One replacement for each maximal malformed part, as Unicode recommends and byte-level tokenizers do."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _PerByteUtf8:
    """One replacement for each malformed byte, as SentencePiece's byte fallback does."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> str:
        if not self._pending and data.isascii():
            return data.decode()
        out = []
        for value in data:
            self._pending += bytes([value])
            out.append(self._complete())
        return "".join(out)

    def finish(self) -> str:
        text, self._pending = REPLACEMENT * len(self._pending), b""
        return text

    def _complete(self) -> str:
        """Return the pending character once it is complete, "" while it may still become so, else its replacements."""
        try:
            text = codecs.getincrementaldecoder("utf-8")(errors="strict").decode(self._pending)
        except UnicodeDecodeError:
            broken, last = len(self._pending) - 1, self._pending[-1:]
            self._pending = b""
            if not broken:
                return REPLACEMENT
            # The last byte does not continue the character; it may begin one.
            self._pending = last
            return REPLACEMENT * broken + self._complete()
        if text:
            self._pending = b""
        return text
