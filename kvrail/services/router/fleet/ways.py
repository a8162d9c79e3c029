"""Where a prompt is computed and where it decodes, among workers that do both: pure functions, as in policy.py.

Each choice is weighed in seconds: for the request, and for the sequences that it delays. Choices within the limits come
before those beyond them. How many workers compute prompts follows the load (split.py), and no worker's role is fixed.
The simulator (benchmarks/simulator) runs these very functions.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import nsmallest
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from kvrail.services.router.fleet.policy import (
    USUAL_SEQUENCE_S,
    USUAL_TOKEN_S,
    Candidate,
    Placement,
    PlacementRequest,
    Policy,
    PrefixAware,
    WorkerChoice,
    able,
    cached_tokens,
    choose,
    known,
    lot,
    suitable,
    wait_s,
)
from kvrail.services.router.fleet.split import Fleet, best_split

HERE, APART = "here", "apart"
MARGIN = 0.2
"""Part by which the other way must be cheaper than the usual one before it is taken: equal costs do not alternate."""
FETCH_S = 2e-3
"""Seconds of a fetch beside its tokens: the call and the handshake."""
USUAL_CHUNK = 512
"""Tokens of a step with decoding sequences on a worker that does not say."""
USUAL_STEP_S = 10e-3
"""Seconds of a step on a worker that has not measured one."""
BUSY, BUSY_WAIT = 0.95, 0.4
"""From this part of prefill workers' time on that prompts need, they wait for a shorter part of what they may: all wait
for as long as they may then, and sooner or later others help. With less to do, who waits evens out a burst."""
ALTERNATES = 3
"""Further prefill workers that a request names."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds: ttft_s to the first token, gap_s between two tokens of a stream."""

    ttft_s: float = 0.5
    gap_s: float = 0.03


class _Cost(NamedTuple):
    """The cost of a choice: the lower, the better. broken: limits that it breaks; late: that of the first token."""

    broken: int
    seconds: float
    tie: tuple[int, int] = (0, 0)
    late: bool = False


class _Worker:
    """A candidate with measured or usual rates, and what is the same for every prompt."""

    __slots__ = (
        *("chunk", "chunk_s", "computes", "decoding", "each", "load"),
        *("sequence_s", "step_s", "token_s", "wait_s"),
    )

    def __init__(
        self, each: Candidate, slo: Slo, token_s: float, sequence_s: float, *, both: bool, busy: float | None
    ) -> None:
        """both: a prompt delays the sequences that decode there. busy: part of its time that prompts are to have.

        None for busy: it is to compute none.
        """
        load, most = each.load, each.load.chunk_tokens or USUAL_CHUNK
        self.each, self.load, self.token_s, self.sequence_s = each, load, token_s, sequence_s
        self.computes = busy is not None
        self.decoding = load.sequences if both else 0
        self.wait_s = wait_s(load, token_s)
        self.step_s = load.step_s + self.decoding * sequence_s if self.decoding else 0.0
        # Tokens of a step beside decoding: what keeps the limit of gaps, at least an eighth of the most.
        self.chunk = max(most / 8, min(most, (slo.gap_s - self.step_s) / token_s))
        self.chunk_s = most * token_s * (busy or 0.0)


class _Prompt:
    """What one prompt costs on workers."""

    def __init__(self, request: PlacementRequest, slo: Slo) -> None:
        self._request, self._slo = request, slo
        self._cached: dict[str, int] = {}
        self._computed: dict[_Worker, _Cost] = {}

    def missing(self, worker: _Worker) -> int:
        """Tokens of the prompt that the worker has not cached."""
        each = worker.each
        if (cached := self._cached.get(each.target)) is None:
            cached = self._cached[each.target] = cached_tokens(self._request, each)
        return self._request.prompt_tokens - cached

    def placed(self, worker: _Worker) -> Placement:
        """Its place there."""
        return Placement(worker.each.target, "cost", self._request.prompt_tokens - self.missing(worker))

    def computed(self, worker: _Worker) -> _Cost:
        """The prompt is computed there, beside what decodes."""
        if (cost := self._computed.get(worker)) is None:
            cost = self._computed[worker] = self._compute(worker)
        return cost

    def first_s(self, worker: _Worker) -> float:
        """Seconds until the prompt is computed there."""
        missing = self.missing(worker)
        steps = math.ceil((worker.load.backlog + missing) / worker.chunk)
        return worker.wait_s + missing * worker.token_s + steps * worker.step_s

    def _compute(self, worker: _Worker) -> _Cost:
        missing, first_s = self.missing(worker), self.first_s(worker)
        gap_s = worker.step_s + min(worker.chunk, missing) * worker.token_s if worker.decoding else 0.0
        late = first_s > self._slo.ttft_s
        broken = late + (gap_s > self._slo.gap_s)
        tie = worker.load.sequences, lot(self._request, worker.each.target)
        return _Cost(broken, first_s + worker.decoding * missing * worker.token_s, tie, late)

    def served(self, worker: _Worker) -> _Cost:
        """The prompt is computed there, and decodes there."""
        cost = self.computed(worker)
        return cost._replace(seconds=cost.seconds + self._decoding_s(worker))

    def decoded(self, worker: _Worker) -> _Cost:
        """It decodes there, on KV from another worker."""
        seconds = FETCH_S + self.missing(worker) * worker.load.fetch_s + worker.wait_s + self._decoding_s(worker)
        return _Cost(0, seconds, self.computed(worker).tie)

    def _decoding_s(self, worker: _Worker) -> float:
        """Seconds that the sequences there and the request cost each other, and that prompts to come cost it."""
        tokens = self._request.n * self._request.output_tokens
        return tokens * (2 * worker.load.sequences * worker.sequence_s + worker.chunk_s)


@dataclass(frozen=True, slots=True)
class _Kind:
    """The workers for requests that ask for one form of pages.

    suiting: those whose pages serve them, in whatever state. both: targets of those that do both; if there are none,
    nothing is weighed here. deciding, computing: those to decode on, and to compute prompts. split: see `best_split`.
    """

    suiting: Sequence[Candidate]
    both: AbstractSet[str]
    deciding: Sequence[_Worker]
    computing: Sequence[_Worker]
    split: int | None


class Snapshot:
    """The workers of one moment, and what the choices for all prompts share.

    decode, prefill: a worker of both roles is in both. split: that of the last choice. waited: seconds that the
    first prompt has waited for its turn, of those that ask for one form of pages.
    """

    def __init__(
        self,
        decode: Sequence[Candidate],
        prefill: Sequence[Candidate],
        slo: Slo,
        split: int | None = None,
        waited: Mapping[str, float] | None = None,
    ) -> None:
        self.decode, self.prefill, self.slo, self._split = decode, prefill, slo, split
        self._waited = waited or {}
        self._kinds: dict[str, _Kind] = {}

    def kind(self, kv_cache: str) -> _Kind:
        """The workers for requests that ask for such pages (kvrail.values.kv_cache.Asked)."""
        if kv_cache not in self._kinds:
            suiting, ready = suitable(kv_cache, self.decode), able(self.prefill)
            deciding = able(suiting)
            both = {each.target for each in (*able(self.decode), *deciding)} & {each.target for each in ready}
            busy, split = self._busy(kv_cache, deciding, ready, both) if both and deciding else ({}, None)
            computing = self._rated(ready, both, busy) if both else []
            rated = computing if deciding == ready or not both else self._rated(deciding, both, busy)
            self._kinds[kv_cache] = _Kind(suiting, both, rated, computing, split)
        return self._kinds[kv_cache]

    def patience_s(self, most_s: float) -> float:
        """Seconds that a prompt waits for a prefill worker before others help; at most most_s.

        Prompts that others compute count too: a prefill worker is given no more than it can compute.
        """
        ready = able(self.prefill)
        if not ready or math.isinf(most_s):
            return most_s
        deciding = {each.target for each in self.decode}
        both = sum(each.target in deciding for each in ready)
        computing = len(ready) if self._split is None else len(ready) - both + min(self._split, both)
        loads = {each.target: each.load for each in (*self.decode, *ready)}.values()
        given = max(sum(load.tokens_per_s for load in loads), sum(load.recent_per_s for load in loads))
        return BUSY_WAIT * most_s if given * fmean(_token_s(ready)) > BUSY * computing else most_s

    def _rated(
        self, ready: Sequence[Candidate], both: AbstractSet[str], busy: Mapping[str, float | None]
    ) -> list[_Worker]:
        sequence_s = known([each.load.sequence_s for each in ready], USUAL_SEQUENCE_S)
        return [
            _Worker(each, self.slo, *rates, both=each.target in both, busy=busy.get(each.target, 0.0))
            for each, *rates in zip(ready, _token_s(ready), sequence_s, strict=True)
        ]

    def _busy(
        self, kv_cache: str, deciding: Sequence[Candidate], ready: Sequence[Candidate], both: AbstractSet[str]
    ) -> tuple[dict[str, float | None], int | None]:
        """Part of their time that prompts are to have, of workers of both roles; None: they are to compute none."""
        names = [each.target for each in ready if each.target in both]
        rated = list(zip(ready, _token_s(ready), strict=True))
        prompts = sum(each.load.tokens_per_s * each_s for each, each_s in rated)
        recent = sum(each.load.recent_per_s * each_s for each, each_s in rated)
        others = [] if self._split is None else names[self._split :]
        waits = (wait_s(each.load, each_s) for each, each_s in rated if each.target not in others)
        fleet = Fleet(
            decoding=len(deciding),
            both=len(names),
            prefill=len(ready) - len(names),
            prompts=prompts,
            recent=recent,
            sequences=sum(each.load.sequences for each in deciding),
            step_s=fmean(known([each.load.step_s for each in deciding], USUAL_STEP_S)),
            sequence_s=fmean(known([each.load.sequence_s for each in deciding], USUAL_SEQUENCE_S)),
            wait_s=self._waited.get(kv_cache, 0.0) + min(waits, default=0.0),
        )
        split = best_split(fleet, self._split, self.slo.ttft_s, self.slo.gap_s)
        computing = len(names) if split is None else split
        part = min(1.0, prompts / max(1, computing + fleet.prefill))
        return {name: part if place < computing else None for place, name in enumerate(names)}, split


def choose_way(
    policy: Policy, request: PlacementRequest, workers: Snapshot, *, urgent: bool, spare_s: float = math.inf
) -> WorkerChoice | None:
    """The best workers with room for a request now; None if it has to wait. Without workers of both roles: `choose`.

    urgent, spare_s: see `choose`.
    """
    kind = workers.kind(request.kv_cache)
    if kind.both and isinstance(policy, PrefixAware):
        prompt = _Prompt(request, workers.slo)
        choice = _choose(prompt, request, kind, urgent=urgent, spare_s=spare_s)
        return choice and replace(choice, split=kind.split)
    if able_to := [each for each in kind.suiting if each.target in kind.both]:
        choice = choose(policy, request, able_to, [], urgent=urgent, spare_s=spare_s)
        return choice and replace(choice, way=(HERE, "policy"))
    return choose(policy, request, kind.suiting, workers.prefill, urgent=urgent, spare_s=spare_s)


def _choose(
    prompt: _Prompt, request: PlacementRequest, kind: _Kind, *, urgent: bool, spare_s: float
) -> WorkerChoice | None:
    """The better of the best worker alone and the best two: one that computes and one that decodes."""

    def in_time(workers: Iterable[_Worker]) -> list[_Worker]:
        return [each for each in workers if urgent or not each.load.fed]

    deciding = [each for each in kind.deciding if request.local or each.each.target in kind.both]
    able_to = [] if request.local else in_time(kind.computing)
    if kind.split is not None and not request.local:
        # Prompts go to the workers that are to compute them, unless the first token would come too late there, or
        # another one has at most half as much to compute, since it has the beginning cached.
        those = [each for each in able_to if each.computes]
        if not those:
            return _helped(prompt, request, kind, spare_s)
        if any(not prompt.computed(each).late for each in those):
            half = min(prompt.missing(each) for each in those) / 2
            able_to, deciding = (
                [each for each in workers if each.computes or prompt.missing(each) <= half]
                for workers in (able_to, deciding)
            )
    here = (each for each in in_time(deciding) if each.load.has_room(request.n))
    alone = min(((prompt.served(each), each) for each in here), key=_cost, default=None)
    # The costs of two different workers add up, so they are among the best two for either part.
    computing = [each for each in able_to if each.load.has_room()]
    firsts = nsmallest(ALTERNATES + 2, ((prompt.computed(each), each) for each in computing), key=_cost)
    roomy = (each for each in kind.deciding if each.load.has_room(request.n)) if firsts else ()
    seconds = nsmallest(2, ((prompt.decoded(each), each) for each in roomy), key=_cost)
    pairs = (
        (one._replace(seconds=one.seconds + two.seconds), first, second)
        for one, first in firsts[:2]
        for two, second in seconds
        if first.each.target != second.each.target
    )
    pair = min(pairs, key=_cost, default=None)
    if alone is None and pair is None:
        return None
    way = _way(alone and alone[0], pair and pair[0], HERE if kind.split is None else APART)
    if alone is not None and way[0] == HERE:
        return WorkerChoice(prompt.placed(alone[1]), [], way)
    assert pair is not None
    _, first, second = pair
    others = [each for _, each in firsts if each is not first and each.each.target != second.each.target]
    prefill = [prompt.placed(each) for each in (first, *others[:ALTERNATES])]
    return WorkerChoice(prompt.placed(second), prefill, way)


def _helped(prompt: _Prompt, request: PlacementRequest, kind: _Kind, spare_s: float) -> WorkerChoice | None:
    """A worker that only decodes computes the prompt; None if it has to wait for those that are to compute it.

    It helps where these would take it up too late, and not before it would be done first.
    """
    busy = min((each for each in kind.computing if each.computes), key=prompt.first_s, default=None)
    if busy is not None and busy.wait_s <= spare_s:
        return None
    most_s = math.inf if busy is None else prompt.first_s(busy)
    helpers = (each for each in kind.deciding if not (each.computes or each.load.fed) and each.load.has_room(request.n))
    in_time = ((prompt.served(each), each) for each in helpers if prompt.first_s(each) <= most_s)
    best = min(in_time, key=_cost, default=None)
    return best and WorkerChoice(prompt.placed(best[1]), [], (HERE, "ttft"))


_cost = itemgetter(0)


def _way(here: _Cost | None, apart: _Cost | None, usual: str) -> tuple[str, str]:
    """The better way and why: a limit that the other one breaks, its cost, that it is the usual or the only one."""
    if here is None or apart is None:
        return APART if here is None else HERE, "only"
    if here.broken != apart.broken:
        return HERE if here.broken < apart.broken else APART, "ttft" if here.late != apart.late else "gap"
    cheaper = HERE if here.seconds <= apart.seconds else APART
    margin = 1 + MARGIN
    if usual == HERE:
        way = APART if apart.seconds * margin < here.seconds else HERE
    else:
        way = HERE if here.seconds * margin < apart.seconds else APART
    return way, "cost" if way == cheaper else "usual"


def _token_s(ready: Sequence[Candidate]) -> list[float]:
    return known([each.load.compute_s or each.load.token_s for each in ready], USUAL_TOKEN_S)
