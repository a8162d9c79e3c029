"""One mix: an engine of a random setting, random requests, and all that can happen to them, at any moment."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrail.engine.kv.prefix_events import Cursor
from kvrail.engine.request.events import Admitted, Failed, Finished, Prefilled, Verified
from kvrail.engine.request.requests import WrittenPages
from kvrail.values.pagehash import page_digest
from kvrail.values.sampling import SamplingParams
from tests.engine.captured_machine import MAX_LEN
from tests.engine.mixes.asking import MOST_TOKENS, Ask, Asking, request, tokenizer
from tests.engine.mixes.comparing import check_alone, compare
from tests.engine.mixes.site import Answer, Setting, Site, answer_of
from tests.engine.mixes.transfers import Sending, Taking, Transfer

FORMS = ("plain", "lossless", "plain", "lossy", "captured")
MOST_STEPS = 20_000
MOST_IDLE = 60
"""Steps in a row that compute nothing and tell nothing: such an engine hangs, or is busy for nothing."""
PATIENCE = 30
"""Rounds without work after which transfers come to an end."""


def setting_of(rng: random.Random, form: str, seed: int, longest: int) -> Setting:
    """longest: tokens of a prompt. The pool holds one request at least, often no more."""
    page_size = 4 if form in ("lossy", "captured") else rng.choice([1, 2, 4, 4, 8, 16])
    context = rng.choice([4096, 4096, longest + rng.randint(2, MOST_TOKENS)])
    need = -(-(longest + MOST_TOKENS + 1) // page_size)
    opened = need + rng.choice([0, 1, rng.randint(0, need)])
    pages = need + rng.choice([0, 0, 1, rng.randint(0, need), rng.randint(0, 4 * need)])
    if form in ("lossless", "lossy"):
        pages = opened + rng.randint(1, 2 * need)
    running = rng.choice([1, 2, 4, 8, 16])
    limits = {
        "max_running": running,
        "max_batch_tokens": max(running, rng.choice([8, 16, 33, 64, 128, 256])),
        "mixed_batch_tokens": rng.choice([0, 0, 8, 32]),
        "prompt_rows": rng.choice([1, 3, 16, 256]),
    }
    return Setting(
        form,
        page_size,
        pages,
        opened,
        MAX_LEN if form == "captured" else context,
        limits,
        ahead=rng.random() < 0.5,
        prefix_cache=rng.random() < 0.8,
        max_drafts=rng.choice([0, 1, 3, 16, 64, 64]),
        breaks=rng.choice([0, 0, 0, 0.01]),
        seed=seed,
    )


def quiet(setting: Setting, longest: int) -> Setting:
    """Of an engine with room for one request, which does nothing in parts, at once, ahead or from a cache."""
    pages = 5 * -(-(longest + MOST_TOKENS + 1) // setting.page_size)
    return Setting(
        "plain" if setting.form == "captured" else setting.form,
        setting.page_size,
        pages,
        pages,
        setting.context,
        {"max_running": 8, "max_batch_tokens": 512},
    )


class Mirror:
    """The prefix cache as one who reads its events knows it."""

    def __init__(self, site: Site) -> None:
        self._site, self._cursor = site, Cursor()
        self._known: set[object] = set()

    def read(self, limit: int) -> bool:
        """Take in up to `limit` events; whether these are all."""
        events = self._site.engine.kv_events(self._cursor, limit)
        if events.snapshot:
            self._known.clear()
        self._known.difference_update(events.removed)
        self._known.update(events.stored)
        self._cursor = events.cursor
        return events.complete

    def check(self) -> None:
        """Raise AssertionError unless all events make what is cached."""
        while not self.read(7):
            pass
        cached = {page_digest(each) for each in self._site.pool._page_of}
        assert self._known == cached, "the cache's events do not make what is cached"


@dataclass
class Tally:
    """What happened in a mix; a test sees by it that mixes are mixed."""

    kinds: set[str] = field(default_factory=set)
    preempted: int = 0
    proposed: int = 0
    accepted: int = 0


class Mix:
    """seed: of all that is random here; the same seed gives the same mix."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = rng = random.Random(seed)
        form = FORMS[seed % len(FORMS)]
        longest = rng.choice([8, 16, 40, 40] if form == "captured" else [8, 16, 40, 90])
        self.setting = setting_of(rng, form, seed, longest)
        self._quiet = Site(quiet(self.setting, longest), tokenizer())
        self._poison = rng.random() < 0.3
        self._rate, self._ends = rng.choice([0.02, 0.1, 0.3]), rng.choice([0.02, 0.1, 1.0])
        self._arrive, self._claim = rng.choice([0.3, 0.8, 0.98]), rng.choice([0.1, 0.7])
        self._asking = Asking(rng, longest, self.setting.page_size, self._alone)
        self._coming = [self._asking.ask(f"r{number}") for number in range(rng.choice([15, 30, 50]))]
        self._asked: dict[str, Ask] = {}
        self._transfers: dict[str, Transfer] = {}
        self._written: dict[str, list[range]] = {}
        self._patient = True
        self.site = Site(self.setting, tokenizer(), self)
        self.site.trouble.meanwhile = lambda: self._news() if rng.random() < 0.5 else None

    def begin(self, written: Sequence[WrittenPages]) -> Callable[[int], None]:
        """As the engine's listener."""
        for each in written:
            self._written.setdefault(each.request_id, []).append(range(each.first_page, each.end_page))
        return lambda layer: None

    def run(self) -> Tally:
        """Run to the end. Raises AssertionError, which names the seed, the setting and the request that differs."""
        try:
            self._run()
            for ask in self._asked.values():
                try:
                    compare(self.site, ask)
                except AssertionError as error:
                    raise AssertionError(f"{error}\nin {ask}") from None
        except Exception as error:
            raise AssertionError(f"KVRAIL_MIX={self.seed}: {error}\nwith {self.setting}") from error
        finally:
            self.site.close()
            self._quiet.close()
        drafts = [event for name in self._asked for event in self.site.of(name, Verified)]
        return Tally(
            {ask.kind for ask in self._asked.values()},
            self.site.scheduler.preemptions,
            sum(event.proposed for event in drafts),
            sum(event.accepted for event in drafts),
        )

    def _run(self) -> None:
        engine, mirror, idle, waited = self.site.engine, Mirror(self.site), 0, 0
        for _ in range(MOST_STEPS):
            while self._coming and (self._rng.random() < self._arrive or not (engine.pending() or self._live())):
                ask = self._coming.pop(0)
                self._asked[ask.name] = ask
                engine.submit(ask.request())
            self._patient = waited < PATIENCE
            self._news()
            if engine.pending():
                before = self.site.trouble.steps, self.site.heard
                engine.step()
                waited, idle = 0, idle + 1 if before == (self.site.trouble.steps, self.site.heard) else 0
                assert idle < MOST_IDLE, f"{idle} steps in a row computed nothing: {engine.status()}"
            else:
                waited += 1
                assert waited < 100 * PATIENCE, f"these wait for ever: {[str(ask) for ask in self._live()]}"
            engine.check()
            if self._rng.random() < 0.1:
                mirror.read(self._rng.choice([1, 2, 50]))
            if not (self._coming or engine.pending() or self._live()):
                break
        else:
            raise AssertionError("it does not come to an end")
        for name in self._asked:  # as every caller does at the end, whatever that was
            engine.abort(name)
        assert self.site.pool.counts().used == 0, "pages are held when all is over"
        mirror.check()

    def _alone(self, prompt: list[int], params: SamplingParams) -> Answer:
        """The answer of a request that nothing else is beside."""
        site = self._quiet
        site.forget()
        site.engine.submit(request("alone", prompt, params))
        while site.engine.pending():
            site.engine.step()
        site.engine.check()
        answer = answer_of(site, "alone", params.n)
        try:
            check_alone(answer, prompt, params, self.setting.context)
        except AssertionError as error:
            raise AssertionError(f"KVRAIL_MIX={self.seed}: alone, {error}\nof {params}") from None
        return answer

    def _news(self) -> None:
        """Transfers begin, go on and end; clients leave."""
        for name, ask in list(self._asked.items()):
            transfer = self._transfers.get(name)
            if self.site.of(name, Failed):
                self.site.engine.abort(name)  # as a caller does that reads it; so a lease goes that nobody claimed
            if transfer is not None and not transfer.over:
                if isinstance(transfer, Sending):
                    transfer.ends = self._ends if self._patient else 1.0
                if self._rng.random() < (self._rate if self._patient else 0.3):
                    transfer.news()
            elif transfer is None and not ask.gone and self._rng.random() < self._claim:
                self._begin_transfer(ask)
            if ask.leaves and not ask.gone and self._rng.random() < 0.03:
                self.site.engine.abort(name)
                ask.gone = True

    def _begin_transfer(self, ask: Ask) -> None:
        admitted = self.site.of(ask.name, Admitted)
        if not admitted or self.site.of(ask.name, Failed):
            return
        if ask.kind == "prefill":
            written = self._written.setdefault(ask.name, [])
            self._transfers[ask.name] = Taking(self.site, ask, self.setting, self._rng, written)
        elif admitted[0].awaits_kv:
            self._transfers[ask.name] = Sending(self.site, ask, self.setting, self._rng, poison=self._poison)

    def _live(self) -> list[Ask]:
        return [ask for ask in self._asked.values() if self._is_live(ask)]

    def _is_live(self, ask: Ask) -> bool:
        transfer = self._transfers.get(ask.name)
        if transfer is not None and not transfer.over:
            return True
        if ask.gone or self.site.of(ask.name, Failed):
            return False
        ended = self.site.of(ask.name, Finished) or self.site.of(ask.name, Prefilled)
        return not ended or (ask.kind == "prefill" and transfer is None)
