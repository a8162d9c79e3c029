"""Compiles grammars within limits, clients in turn, and each text once for all requests that send it."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvrail.errors import InvalidRequestError
from kvrail.grammar.matching import Matcher
from kvrail.runtime.turns import Turns
from kvrail.text import Tokenizer
from kvrail.values.sampling import MAX_GRAMMAR_BYTES

T = TypeVar("T")

MAX_CACHED = 32
"""Compiled grammars that a process keeps; one takes some 100 kB, the worst that passes the limits tens of megabytes."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=6_000,
    max_items_in_row=2000,
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""llguidance's bounds: tighter than its defaults where these let a step take seconds (an ambiguous grammar) or hundreds
of megabytes (a lexer's states). Objects of 400 optional properties and enums of 3,000 values are well within."""


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def matcher(self) -> Matcher:
        """The state of an output that has not begun. Its copies share what each learns of the grammar's lexer."""
        return Matcher(self._start.deep_copy())


def ends_of(tokenizer: Tokenizer, eos_token_ids: Collection[int] = ()) -> list[int]:
    """Tokens that end an output: `eos_token_ids`, or those that the tokenizer's files name."""
    ends = sorted(eos_token_ids or tokenizer.eos_token_ids)
    if not ends:
        raise InvalidRequestError("this model has no end-of-sequence token, which ends what matches a grammar")
    return ends


def compile_text(tokenizer: LLTokenizer, text: str) -> Grammar:
    """The grammar that `text` describes; InvalidRequestError says why it has none. Other threads run meanwhile."""
    start = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not start.is_error():
        start.compute_bitmask()  # what has no first token is found out here
    if start.is_error():
        raise InvalidRequestError(reason_of(start))
    return Grammar(start)


class Grammars:
    """The grammars of a worker, over one tokenizer. The router has checked each (kvrail.grammar.checking).

    load: returns the tokenizer; called when the first grammar comes. eos_token_ids: tokens that end an output.
    vocab_size: length of the model's logits. By default both are as the tokenizer's files have them.
    """

    def __init__(self, load: Callable[[], Tokenizer], eos_token_ids: Collection[int] = (), vocab_size: int = 0) -> None:
        self._load = load
        self._ends, self._vocab_size = eos_token_ids, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._cached: OrderedDict[bytes, Grammar] = OrderedDict()
        self._turns = Turns()

    async def get(self, text: str, client: str) -> Grammar | None:
        """The grammar that `text` describes, None where it is empty; InvalidRequestError where it cannot be compiled.

        client: the name of the client, for turns. One grammar is compiled at a time: however many come, they keep one
        core busy.
        """
        if not text:
            return None
        key = digest(text)
        found = self._cached.get(key)
        if found is None:
            found = await self._turns.run(client, lambda: self._cached.get(key) or self._compile(text))
        keep(self._cached, key, found, MAX_CACHED)
        return found

    def _compile(self, text: str) -> Grammar:
        if self._tokenizer is None:
            tokenizer = self._load()
            ends = ends_of(tokenizer, self._ends)
            size = self._vocab_size or tokenizer.vocab_size
            self._tokenizer = LLTokenizer(tokenizer.to_json(size), n_vocab=size, eos_token=ends)
        return compile_text(self._tokenizer, text)


def digest(text: str) -> bytes:
    """A key for `text`; InvalidRequestError where it is too long or not Unicode."""
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("has half a surrogate pair; send valid Unicode") from None
    if len(data) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"makes a grammar of {len(data)} bytes, more than {MAX_GRAMMAR_BYTES}; send a smaller one"
        )
    return hashlib.sha256(data).digest()


def keep(found: "OrderedDict[bytes, T]", key: bytes, value: T, most: int) -> None:
    """Keep `value` as the newest of at most `most`."""
    found[key] = value
    found.move_to_end(key)
    if len(found) > most:
        found.popitem(last=False)


def reason_of(state: LLMatcher) -> str:
    """Why a grammar cannot be followed, in one line."""
    reason = state.get_error().strip().splitlines()[0][:300]
    if reason.startswith("NoExtension"):
        reason = "no text matches it"
    return reason
