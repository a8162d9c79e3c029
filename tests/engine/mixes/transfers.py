"""What other workers do with one request's pages: they send its KV, in any order and form, or take what is computed."""

import random
from typing import Protocol

from kvrail.engine.batch.batch import SampledToken
from kvrail.engine.kv.leases import PageLease
from kvrail.engine.request.events import Admitted, Failed, Prefilled
from tests.engine.mixes.asking import Ask
from tests.engine.mixes.machine import POISON, kv_of_prompt
from tests.engine.mixes.site import Setting, Site


class Transfer(Protocol):
    """A claim on a request's pages. over: it has been given back."""

    over: bool

    def news(self) -> None:
        """Something happens, or not."""
        ...


class Sending:
    """Another worker computes the prompt: first token, coarse and exact KV, parts of it, losses, another try.

    ends: how likely what would end it does; poison: whether KV may come that is not finite.
    """

    def __init__(self, site: Site, ask: Ask, setting: Setting, rng: random.Random, *, poison: bool) -> None:
        self.over = False
        self.ends = 1.0
        self._site, self._ask, self._form, self._rng, self._poison = site, ask, setting.form, rng, poison
        lease = site.engine.claim_lease(ask.name)
        assert lease is not None, "the pages of a request that awaits KV can not be claimed"
        self._lease: PageLease = lease
        self._size = setting.page_size
        self._held = site.of(ask.name, Admitted)[0].cached_tokens // self._size
        self._pages = -(-len(ask.prompt) // self._size)
        self._told = False

    def news(self) -> None:
        draw = self._rng.random()
        if self._ask.gone:  # it does not know yet, and writes into pages that are still its own
            self._write("noise", self._held, self._pages)
            if draw < 0.5:
                self._release()
        elif not self._told and self._rng.random() < 0.5:
            self._tell_first()
        elif draw < 0.35:
            self._write(self._rng.choice(["exact", "exact", "rounded", "rounded", "noise"]), self._held, self._pages)
            with self._site.engine.change() as requests:
                requests.receive_coarse_kv(self._ask.name)
        elif draw < 0.5:
            begin = self._rng.randrange(self._held, self._pages)
            self._write("exact", begin, self._rng.randint(begin + 1, self._pages))
        elif self._rng.random() < self.ends:
            self._come_to_an_end(draw)

    def _come_to_an_end(self, draw: float) -> None:
        engine, name = self._site.engine, self._ask.name
        if draw < 0.57:
            with engine.change() as requests:
                requests.drop_drafts(name)
            self._told = self._told and self._rng.random() < 0.75  # another worker begins anew
        elif draw < 0.85 and self._told:
            self._write("poison" if self._poison and self._rng.random() < 0.3 else "exact", self._held, self._pages)
            with engine.change() as requests:
                requests.receive_kv(name)
            self._release()
        elif draw > 0.95:
            engine.abort(name)
            self._ask.gone = True
        elif draw > 0.87:
            with engine.change() as requests:
                requests.compute_here(name)
            self._release()

    def _tell_first(self) -> None:
        alone, self._told = self._ask.alone, True
        scores = [each[0] if each else None for each in alone.logprobs]
        first = [SampledToken(tokens[0], score) for tokens, score in zip(alone.tokens, scores, strict=True)]
        with self._site.engine.change() as requests:
            requests.receive_first_tokens(self._ask.name, first)

    def _write(self, form: str, begin: int, end: int) -> None:
        """Whole pages: what lies behind the prompt is overwritten too."""
        sent = kv_of_prompt(self._form, self._ask.prompt)
        sent += [77] * (-len(sent) % self._size)
        place = self._rng.randrange(begin * self._size, end * self._size)
        if form == "rounded":
            sent[place] += 1
        elif form == "poison":
            sent[place], self._site.poisoned = POISON, True
        elif form == "noise":
            sent = [(value * 7 + 3) % 256 for value in sent]
        for number in range(begin, end):
            self._site.cells[self._lease.pages[number]] = sent[number * self._size : (number + 1) * self._size]

    def _release(self) -> None:
        self._site.engine.release_lease(self._lease)
        self.over = True


class Taking:
    """Another worker reads the pages of a prompt that is computed here, and gives them back at some time."""

    def __init__(self, site: Site, ask: Ask, setting: Setting, rng: random.Random, written: list[range]) -> None:
        self._site, self._ask, self._setting, self._rng, self._written = site, ask, setting, rng, written
        self._lease = site.engine.claim_lease(ask.name)
        self.over = self._lease is None

    def news(self) -> None:
        done = bool(self._site.of(self._ask.name, Prefilled))
        dropped = self._site.of(self._ask.name, Failed) or self._ask.gone
        if self._lease is not None and (done or dropped) and self._rng.random() < 0.5:
            if done:
                self._compare(self._lease)
            self._site.engine.release_lease(self._lease)
            self.over = True

    def _compare(self, lease: PageLease) -> None:
        """All pages were cached or announced as written, and hold the prompt's KV as nobody has closed it."""
        size, prompt = self._setting.page_size, self._ask.prompt
        pages = -(-len(prompt) // size)
        cached = self._site.of(self._ask.name, Admitted)[0].cached_tokens // size
        told = {page for each in (range(cached), *self._written) for page in each}
        assert told >= set(range(pages)), f"{self._ask}: of {pages} pages only {told} were announced as written"
        held = [int(value) for page in lease.pages[:pages] for value in self._site.cells[page]][: len(prompt)]
        assert held == kv_of_prompt(self._setting.form, prompt), f"{self._ask}: the pages of a prefill differ"
