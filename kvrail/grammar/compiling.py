"""Compiling grammars, off the loop that serves everybody, within limits, and once for all who send the same."""

import asyncio
import hashlib
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvrail.errors import InvalidRequestError
from kvrail.grammar.matching import Matcher
from kvrail.sampling import MAX_GRAMMAR_BYTES
from kvrail.text import Tokenizer

T = TypeVar("T")

MAX_CACHED = 32
"""Compiled grammars that a process keeps; one takes some 100 kB, the worst that passes the limits tens of megabytes."""
MAX_CHECKED = 1024
"""Digests of grammars that were found good."""
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
PROBED_TOKENS = 32
PROBE_S = 0.25
"""CPU time in which the tokens of a probe must be found."""


class Grammar:
    """A compiled grammar."""

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def matcher(self) -> Matcher:
        """The place of an output that has not begun. What its copies learn of the grammar's lexer, all know."""
        return Matcher(self._start.deep_copy())


class Grammars:
    """The grammars of one process, over one tokenizer.

    load: gives the tokenizer, when the first grammar comes. eos_token_ids: tokens that end an output; by default those
    that the tokenizer's files name.
    """

    def __init__(self, load: Callable[[], Tokenizer], eos_token_ids: Collection[int] = ()) -> None:
        self._load = load
        self._ends = sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._cached: OrderedDict[bytes, Grammar] = OrderedDict()
        self._checked: OrderedDict[bytes, bool] = OrderedDict()
        self._turn = asyncio.Semaphore(1)

    async def check(self, text: str) -> None:
        """Raise InvalidRequestError where `text` cannot be compiled, or followed at a bearable cost.

        Nothing is kept of it but its digest.
        """
        key = _digest(text)
        if key not in self._checked:
            async with self._turn:
                await asyncio.to_thread(self._follow, text)
            _keep(self._checked, key, True, MAX_CHECKED)

    async def get(self, text: str) -> Grammar | None:
        """The grammar that `text` describes, None where it is empty; InvalidRequestError where it cannot be compiled.

        Compiled in a thread, one after the other: however many come, one core is busy with them, and without the
        interpreter's lock.
        """
        if not text:
            return None
        key = _digest(text)
        if key not in self._cached:
            async with self._turn:
                found = self._cached.get(key)
                if found is None:
                    found = await asyncio.to_thread(self._compile, text)
                _keep(self._cached, key, found, MAX_CACHED)
        self._cached.move_to_end(key)
        return self._cached[key]

    def _follow(self, text: str) -> None:
        """Compile, and write the beginning of an output at random, until limits or the time are exceeded."""
        state = self._compile(text).matcher().state
        rng, begin = random.Random(0), time.thread_time()
        for _ in range(PROBED_TOKENS):
            mask = bytearray(state.compute_bitmask())
            if state.is_error():
                raise InvalidRequestError(_reason(state))
            for end in self._ends:
                mask[end // 8] &= ~(1 << end % 8)
            if not any(mask):
                return
            if time.thread_time() - begin > PROBE_S:
                raise InvalidRequestError(
                    f"takes more than {PROBE_S:g} s to follow for some tokens; send a simpler one"
                )
            place = rng.randrange(len(mask))
            place = next(i for i in (*range(place, len(mask)), *range(place)) if mask[i])
            state.consume_token(8 * place + rng.choice([bit for bit in range(8) if mask[place] >> bit & 1]))

    def _compile(self, text: str) -> Grammar:
        if self._tokenizer is None:
            tokenizer = self._load()
            self._ends = sorted(self._ends or tokenizer.eos_token_ids)
            if not self._ends:
                raise InvalidRequestError("this model has no end-of-sequence token, which ends what matches a grammar")
            self._tokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=self._ends)
        start = LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)
        if not start.is_error():
            start.compute_bitmask()  # what has no first token is found out here
        if start.is_error():
            raise InvalidRequestError(_reason(start))
        return Grammar(start)


def _digest(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("has half a surrogate pair; send valid Unicode") from None
    if len(data) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"makes a grammar of {len(data)} bytes, more than {MAX_GRAMMAR_BYTES}; send a smaller one"
        )
    return hashlib.sha256(data).digest()


def _keep(found: "OrderedDict[bytes, T]", key: bytes, value: T, most: int) -> None:
    found[key] = value
    if len(found) > most:
        found.popitem(last=False)


def _reason(start: LLMatcher) -> str:
    """Why a grammar does not compile, in one line."""
    reason = start.get_error().strip().splitlines()[0][:300]
    if reason.startswith("NoExtension"):
        reason = "no text matches it"
    return reason
