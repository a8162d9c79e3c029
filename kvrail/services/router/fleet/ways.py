"""Where a prompt is computed and where it decodes, among workers that do both: pure functions, as in policy.py.

Each choice is weighed in seconds: for the request, and for the sequences that it delays. Choices within the limits come
before those beyond them. Prompts on all workers would delay all sequences. So they are drawn to the first workers of
the list, as many as their rate needs, and output to the others: how many that is follows the load, and no worker's role
is fixed. The simulator (benchmarks/simulator) runs these very functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvrail.services.router.fleet.policy import (
    USUAL_SEQUENCE_S,
    USUAL_TOKEN_S,
    Candidate,
    Load,
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
)

HERE, APART = "here", "apart"
MARGIN = 0.2
"""Part by which the other way must be cheaper than the usual one before it is taken: equal costs do not alternate."""
FETCH_S = 2e-3
"""Seconds of a fetch beside its tokens: the call and the handshake."""
USUAL_CHUNK = 512
"""Tokens of a step with decoding sequences on a worker that does not say."""
UTILISATION = 0.9
"""Part of their time that the workers that prompts are drawn to compute them."""
ALTERNATES = 3
"""Further prefill workers that a request names."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds: ttft_s to the first token, gap_s between two tokens of a stream."""

    ttft_s: float = 0.5
    gap_s: float = 0.03


@dataclass(frozen=True, slots=True)
class _Cost:
    """The cost of a choice. late, halting: it breaks the limit of the first token, or of gaps. tie: among equals."""

    late: bool
    halting: bool
    seconds: float
    tie: tuple[int, int] = (0, 0)

    @property
    def rank(self) -> tuple[int, float, tuple[int, int]]:
        """The lower, the better."""
        return self.late + self.halting, self.seconds, self.tie


@dataclass(frozen=True, slots=True)
class _Worker:
    """A candidate with measured or usual rates.

    decoding: its sequences that a prompt would delay. busy: part of its time that prompts are to have.
    """

    each: Candidate
    load: Load
    cached: int
    missing: int
    decoding: int
    token_s: float
    sequence_s: float
    busy: float

    @property
    def placed(self) -> Placement:
        return Placement(self.each.target, "cost", self.cached)

    @property
    def in_time(self) -> bool:
        return self.load.has_time(self.missing)

    def computes(self, request: PlacementRequest, slo: Slo) -> _Cost:
        """The prompt is computed here, beside what decodes."""
        load = self.load
        wait_s = max(0.0, load.backlog * self.token_s - load.computing_s)
        own_s = self.missing * self.token_s
        step_s = load.step_s + self.decoding * self.sequence_s if self.decoding else 0.0
        chunk = self._chunk(slo.gap_s - step_s)
        first_s = wait_s + own_s + math.ceil((load.backlog + self.missing) / chunk) * step_s
        gap_s = step_s + min(chunk, self.missing) * self.token_s if self.decoding else 0.0
        tie = load.sequences, lot(request, self.each.target)
        return _Cost(first_s > slo.ttft_s, gap_s > slo.gap_s, first_s + self.decoding * own_s, tie)

    def _chunk(self, spare_s: float) -> float:
        """Tokens of its steps beside decoding: what keeps the limit of gaps, at least an eighth of the most."""
        most = self.load.chunk_tokens or USUAL_CHUNK
        return max(most / 8, min(most, spare_s / self.token_s))

    def decodes(self, request: PlacementRequest) -> float:
        """Seconds that its sequences and the request cost each other, and that prompts to come cost the request."""
        chunk_s = (self.load.chunk_tokens or USUAL_CHUNK) * self.token_s * self.busy
        return request.n * request.output_tokens * (2 * self.load.sequences * self.sequence_s + chunk_s)

    def fetches(self, request: PlacementRequest) -> _Cost:
        """The request decodes here, on KV from another worker; prompts that are computed here delay it."""
        load = self.load
        wait_s = max(0.0, load.backlog * self.token_s - load.computing_s)
        seconds = FETCH_S + self.missing * load.fetch_s + wait_s + self.decodes(request)
        return _Cost(False, False, seconds, (load.sequences, lot(request, self.each.target)))


def choose_way(
    policy: Policy,
    request: PlacementRequest,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    slo: Slo,
    *,
    urgent: bool,
    spare_s: float = math.inf,
    usual: str = HERE,
) -> WorkerChoice | None:
    """The best workers with room for a request now; None if it has to wait. Without workers of both roles: `choose`.

    decode, prefill: a worker of both roles is in both. urgent, spare_s: see `choose`. usual: the way that the prompt
    before took.
    """
    suiting = suitable(request.kv_cache, decode)
    both = {each.target for each in (*able(decode), *able(suiting))} & {each.target for each in able(prefill)}
    able_to = [each for each in suiting if each.target in both]
    prefix_aware = isinstance(policy, PrefixAware)
    if not both or not (able_to or prefix_aware):
        return choose(policy, request, suiting, prefill, urgent=urgent, spare_s=spare_s)
    if not prefix_aware:
        choice = choose(policy, request, able_to, [], urgent=urgent, spare_s=spare_s)
        return choice and WorkerChoice(choice.decode, [], (HERE, "policy"))
    busy = _busy(prefill, both)
    deciding, computing = _workers(request, suiting, both, busy), _workers(request, prefill, both, busy)
    roomy = [each for each in deciding if each.load.has_room(request.n)]
    here = [each for each in roomy if request.local or each.each.target in both]
    apart = [] if request.local else [each for each in computing if each.load.has_room()]
    if not urgent:
        here = [each for each in here if each.in_time]
        apart = [each for each in apart if each.in_time]
    return _choose(request, slo, usual, here, _pairs(request, slo, roomy, apart), apart)


def _choose(
    request: PlacementRequest,
    slo: Slo,
    usual: str,
    here: Sequence[_Worker],
    pair: "tuple[_Cost, _Worker, _Worker] | None",
    computing: Sequence[_Worker],
) -> WorkerChoice | None:
    """The better of the best worker alone and the best pair: of what computes and what decodes."""
    alone = min(((_together(request, slo, each), each) for each in here), key=lambda it: it[0].rank, default=None)
    if alone is None and pair is None:
        return None
    if pair is None or alone is None:
        way, reason = HERE if pair is None else APART, "only"
    else:
        way, reason = _way(alone[0], pair[0], usual)
    if way == HERE:
        assert alone is not None
        return WorkerChoice(alone[1].placed, [], (HERE, reason))
    assert pair is not None
    _, first, decoding = pair
    others = [each for each in computing if each is not first and each.each.target != decoding.each.target]
    others.sort(key=lambda each: each.computes(request, slo).rank)
    return WorkerChoice(decoding.placed, [each.placed for each in (first, *others[:ALTERNATES])], (APART, reason))


def _way(here: _Cost, apart: _Cost, usual: str) -> tuple[str, str]:
    """The better way and why: a limit that the other one breaks, its cost, or that it is the usual one."""
    if here.late + here.halting != apart.late + apart.halting:
        way = HERE if here.rank < apart.rank else APART
        return way, "ttft" if here.late != apart.late else "gap"
    cheaper = HERE if here.seconds <= apart.seconds else APART
    margin = 1 + MARGIN
    if usual == HERE:
        way = APART if apart.seconds * margin < here.seconds else HERE
    else:
        way = HERE if here.seconds * margin < apart.seconds else APART
    return way, "cost" if way == cheaper else "usual"


def _together(request: PlacementRequest, slo: Slo, worker: _Worker) -> _Cost:
    cost = worker.computes(request, slo)
    return _Cost(cost.late, cost.halting, cost.seconds + worker.decodes(request), cost.tie)


def _pairs(
    request: PlacementRequest, slo: Slo, decoding: Sequence[_Worker], computing: Sequence[_Worker]
) -> "tuple[_Cost, _Worker, _Worker] | None":
    """The best two different workers. Both costs add up, so that it is among the best two for either part."""
    firsts = sorted(((each.computes(request, slo), each) for each in computing), key=lambda it: it[0].rank)[:2]
    seconds = sorted(((each.fetches(request), each) for each in decoding), key=lambda it: it[0].rank)[:2]
    found = [
        (_Cost(one.late, one.halting, one.seconds + two.seconds, one.tie), first, second)
        for one, first in firsts
        for two, second in seconds
        if first.each.target != second.each.target
    ]
    return min(found, key=lambda it: it[0].rank, default=None)


def _busy(prefill: Sequence[Candidate], both: "set[str]") -> dict[str, float]:
    """Part of their time that prompts are to have, of workers of both roles: all of the first ones, then none."""
    ready = able(prefill)
    token_s = known([each.load.compute_s or each.load.token_s for each in ready], USUAL_TOKEN_S)
    needed = sum(each.load.tokens_per_s * each_s for each, each_s in zip(ready, token_s, strict=True)) / UTILISATION
    needed -= sum(each.target not in both for each in ready)
    places = enumerate(each.target for each in ready if each.target in both)
    return {target: min(1.0, max(0.0, needed - place)) for place, target in places}


def _workers(
    request: PlacementRequest, candidates: Sequence[Candidate], both: "set[str]", busy: dict[str, float]
) -> list[_Worker]:
    ready = able(candidates)
    token_s = known([each.load.compute_s or each.load.token_s for each in ready], USUAL_TOKEN_S)
    sequence_s = known([each.load.sequence_s for each in ready], USUAL_SEQUENCE_S)
    held = [cached_tokens(request, each) for each in ready]
    return [
        _Worker(
            each,
            each.load,
            held[place],
            request.prompt_tokens - held[place],
            each.load.sequences if each.target in both else 0,
            token_s[place],
            sequence_s[place],
            busy.get(each.target, 0.0),
        )
        for place, each in enumerate(ready)
    ]
