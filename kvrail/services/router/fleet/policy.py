"""Who gets a request: pure functions of the request and of what is known of the workers. No clocks, no network.

One policy serves both roles, and the simulator (benchmarks/simulator) runs these very functions. docs/scheduling.md
tells how they compare.
"""

import math
import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

STEPS_AHEAD = 2
"""Steps full of prompts that a worker gets before their first tokens come: one is computed, one waits."""
USUAL_TOKEN_S = 5e-5
"""Seconds that a token of a prompt takes a worker of which nothing was measured yet: 20,000 tokens a second."""
USUAL_SEQUENCE_S = 1e-4
"""Seconds that a sequence adds to a step, likewise; an 8B model on an H200 has a fifth of that (README, "Measured")."""


class WorkerState(StrEnum):
    """What the router thinks of a worker."""

    STARTING = "starting"  # has not answered yet, and may still come up
    HEALTHY = "healthy"
    DRAINING = "draining"  # finishes what it has
    FAILING = "failing"  # answers, and fails what it is asked
    DOWN = "down"
    INCOMPATIBLE = "incompatible"  # serves another model
    DUPLICATE = "duplicate"  # is a worker that has another address too, which is used


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a policy sees of a request: one prompt.

    pages: digests of the prompt's full pages, as workers report theirs (kvrail/values/pagehash.py). page_size: tokens.
    n: sequences. output_tokens: that each of them will probably have. number: of this request among all, from 0. draw:
    64 random bits. local: whether the decode worker computes the prompt itself, since it needs more of it than KV.
    """

    prompt_tokens: int
    pages: Sequence[int] = ()
    page_size: int = 64
    n: int = 1
    output_tokens: int = 0
    number: int = 0
    draw: int = 0
    local: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is.

    requests: prompts that it has; sequences: theirs that it computes at once. backlog: tokens of prompts that it has
    still to compute; computing_s: seconds since it began with the first of them. max_running: sequences that it
    computes at once. refused: it has just said that it is full. pages_free: pages that nothing holds. token_s: seconds
    that a token of a prompt costs it, compute_s: in which it computes one, sequence_s: that a sequence adds to each
    step; 0: not measured. step_tokens: that one of its steps computes; 0: not known.
    """

    requests: int = 0
    sequences: int = 0
    backlog: int = 0
    computing_s: float = 0.0
    max_running: int = 0
    refused: bool = False
    pages_free: int = 0
    token_s: float = 0.0
    compute_s: float = 0.0
    sequence_s: float = 0.0
    step_tokens: int = 0

    def places(self, n: int) -> int:
        """Of a prompt's n sequences those that it computes at once; an eighth of its room it leaves to others."""
        return min(n, self.max_running - self.max_running // 8)

    def has_room(self, n: int = 1) -> bool:
        """Whether it would compute a prompt's n sequences at once, as far as it ever does."""
        return not self.refused and self.sequences + self.places(n) <= self.max_running

    @property
    def wait_s(self) -> float:
        """Seconds in which it has computed what it has; 0 where its pace is not known."""
        return max(0.0, self.backlog * self.compute_s - self.computing_s)

    def has_time(self, tokens: int) -> bool:
        """Whether it would begin soon with so many tokens: it is given what keeps it at work, and no more."""
        return not self.step_tokens or not self.backlog or self.backlog + tokens <= STEPS_AHEAD * self.step_tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it; target: host:port. holds: digests of pages that it has, or will have soon."""

    target: str
    state: WorkerState
    load: Load
    holds: Container[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a request. reason: what decided, in a word. cached_tokens: of the prompt, that it holds probably."""

    target: str
    reason: str
    cached_tokens: int = 0


class Policy(Protocol):
    """Puts workers into an order."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """Workers that may have the request, the best first, the others as alternates; those without room come last."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Who gets a request now. decode: its decode worker. prefill: prefill workers, the first of which computes it."""

    decode: Placement
    prefill: Sequence[Placement]

    @property
    def computed_tokens(self) -> int:
        """Cached tokens of whoever computes the prompt."""
        return (self.prefill[0] if self.prefill else self.decode).cached_tokens


def choose(
    policy: Policy,
    request: PlacementRequest,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    *,
    urgent: bool,
    spare_s: float = math.inf,
) -> WorkerChoice | None:
    """The best workers that have room for a request now; None where it has to wait.

    urgent: it is the only prompt of its client that is not computed yet; then it waits for no other client's prompts.
    spare_s: seconds that it may still wait for a prefill worker; beyond them a decode worker with time computes it.
    """
    loads = {each.target: each.load for each in (*decode, *prefill)}
    roomy = [each for each in policy.rank(request, decode) if loads[each.target].has_room(request.n)]
    if not roomy:
        return None
    # It draws one token.
    others = [] if request.local else policy.rank(replace(request, n=1, output_tokens=0), prefill)
    computing = others or roomy[:1]
    in_time = [each for each in computing if loads[each.target].has_time(request.prompt_tokens - each.cached_tokens)]
    first = in_time[0] if in_time else computing[0]
    if others and not in_time and loads[first.target].wait_s > spare_s:
        helper = _helper(request, roomy, first, loads)
        if helper is not None:
            return WorkerChoice(replace(helper, reason="overflow"), [])
    if not in_time and not urgent:
        return None
    return WorkerChoice(roomy[0], [first, *(each for each in others if each is not first)] if others else [])


def _helper(
    request: PlacementRequest, decode: Sequence[Placement], prefill: Placement, loads: Mapping[str, Load]
) -> Placement | None:
    """The first decode worker that has time for a prompt and would have computed it no later than a prefill worker."""
    busy = loads[prefill.target]
    there = busy.wait_s + (request.prompt_tokens - prefill.cached_tokens) * busy.compute_s
    for each in decode:
        load, missing = loads[each.target], request.prompt_tokens - each.cached_tokens
        if load.has_time(missing) and (load.backlog + missing) * (load.compute_s or busy.compute_s) <= there:
            return each
    return None


def able(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Healthy workers; failing ones where none is healthy."""
    healthy = [candidate for candidate in candidates if candidate.state is WorkerState.HEALTHY]
    return healthy or [candidate for candidate in candidates if candidate.state is WorkerState.FAILING]


def cached_tokens(request: PlacementRequest, candidate: Candidate) -> int:
    """Tokens of the prompt whose KV the worker has: of leading pages. The last token is computed always."""
    pages = 0
    for digest in request.pages:
        if digest not in candidate.holds:
            break
        pages += 1
    return min(pages * request.page_size, request.prompt_tokens - 1)


class LeastLoad:
    """The worker with fewest sequences; of equals the one with most free pages, then the earlier configured."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        found = sorted(able(candidates), key=lambda each: _busy(request, each))
        return [Placement(each.target, "load", cached_tokens(request, each)) for each in found]


class RoundRobin:
    """One after the other, whatever they have to do."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        ready = able(candidates)
        first = request.number % len(ready) if ready else 0
        turned = ready[first:] + ready[:first]
        turned.sort(key=lambda each: not each.load.has_room(request.n))
        return [Placement(each.target, "turn", cached_tokens(request, each)) for each in turned]


class PowerOfTwo:
    """Two are drawn, and the less busy one is taken: with many workers nearly as even as looking at all of them.

    M. Mitzenmacher, The power of two choices in randomized load balancing, IEEE TPDS 12(10), 2001.
    """

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        ready = able(candidates)
        ready.sort(key=lambda each: not each.load.has_room(request.n))
        drawn = sum(each.load.has_room(request.n) for each in ready) or len(ready)
        pair = []
        if ready:
            first = request.draw % drawn
            second = (first + 1 + (request.draw >> 32) % max(1, drawn - 1)) % drawn
            pair = sorted({first, second}, key=lambda place: _busy(request, ready[place]))
        rest = sorted((p for p in range(len(ready)) if p not in pair), key=lambda place: _busy(request, ready[place]))
        return [Placement(ready[p].target, "draw", cached_tokens(request, ready[p])) for p in [*pair, *rest]]


class PrefixAware:
    """The worker that would give the first token soonest: what waits there, and what of the prompt it has to compute.

    Both are seconds, so a prefix that many ask for draws requests to a worker only as long as waiting there is cheaper
    than computing the prefix once more elsewhere. Of equals one is taken by the prompt's first page: requests that
    begin alike meet even where nobody holds their prefix yet.
    """

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        ready = able(candidates)
        if not ready:
            return []
        token_s = _known([each.load.token_s for each in ready], USUAL_TOKEN_S)
        sequence_s = _known([each.load.sequence_s for each in ready], USUAL_SEQUENCE_S)
        held = [cached_tokens(request, each) for each in ready]
        costs = [
            (request.prompt_tokens - held[place] + each.load.backlog) * token_s[place]
            + each.load.sequences * sequence_s[place] * request.output_tokens
            for place, each in enumerate(ready)
        ]

        full = [not each.load.has_room(request.n) for each in ready]
        ties = [(each.load.sequences, _lot(request, each.target)) for each in ready]
        order = sorted(range(len(ready)), key=lambda p: (full[p], costs[p], ties[p]))
        unaware = min(range(len(ready)), key=lambda p: (full[p], costs[p] + held[p] * token_s[p], ties[p]))
        return [Placement(ready[p].target, "prefix" if held[p] and p != unaware else "load", held[p]) for p in order]


POLICIES: dict[str, Policy] = {
    "prefix-aware": PrefixAware(),
    "least-load": LeastLoad(),
    "power-of-two": PowerOfTwo(),
    "round-robin": RoundRobin(),
}
"""Every policy by its name."""


def _busy(request: PlacementRequest, candidate: Candidate) -> tuple[bool, int, int, int]:
    load = candidate.load
    return not load.has_room(request.n), load.sequences, load.requests, -load.pages_free


def _known(measured: Sequence[float], usual: float) -> list[float]:
    """Where nothing was measured of a worker, the mean of the others'."""
    some = [each for each in measured if each > 0]
    mean = sum(some) / len(some) if some else usual
    return [each if each > 0 else mean for each in measured]


def _lot(request: PlacementRequest, target: str) -> int:
    """Which of equal workers it is: the same for all prompts that begin alike (rendezvous hashing)."""
    seed = request.pages[0] if request.pages else request.draw
    mixed = (zlib.crc32(target.encode()) ^ seed) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
