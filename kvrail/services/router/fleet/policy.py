"""Which workers get a request: pure functions of the request and of the workers' state. No clocks, no network.

One policy serves both roles, and the simulator (benchmarks/simulator) runs these very functions. docs/scheduling.md
compares them.
"""

import math
import zlib
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Protocol, TypeVar

from kvrail.values.kv_cache import suits

STEPS_AHEAD = 2
"""Steps full of prompts that a worker is given at least, if there are as many: one is computed, one waits."""
USUAL_TOKEN_S = 5e-5
"""Seconds per token of a prompt on a worker without measurements: 20,000 tokens a second."""
USUAL_SEQUENCE_S = 1e-4
"""Seconds that a sequence adds to its steps; an 8B model on an H200 needs a fifth (docs/scheduling.md)."""


class WorkerState(StrEnum):
    """A worker's state, as the router judges it."""

    STARTING = "starting"  # has not answered yet, and may still come up
    HEALTHY = "healthy"
    DRAINING = "draining"  # finishes its requests
    FAILING = "failing"  # answers, and fails its requests
    DOWN = "down"
    INCOMPATIBLE = "incompatible"  # serves another model, or says of itself what cannot be
    DUPLICATE = "duplicate"  # is a worker with another address, which is used


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One prompt, as a policy sees it.

    pages: digests of the prompt's full pages, as workers report theirs (kvrail/values/pagehash.py). page_size: tokens.
    n: sequences. output_tokens: the expected length of each. number: counts all requests, from 0. draw: 64 random bits.
    local: whether the decode worker has to compute the prompt, since more than its KV is needed. kv_cache: the pages
    that its decode worker has to keep (kvrail.values.kv_cache.Asked).
    """

    prompt_tokens: int
    pages: Sequence[int] = ()
    page_size: int = 64
    n: int = 1
    output_tokens: int = 0
    number: int = 0
    draw: int = 0
    local: bool = False
    kv_cache: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is.

    requests: its prompts; sequences: those of them that it computes at once. backlog: tokens of prompts that are still
    to be computed; computing_s: seconds since it began with the first of them. max_running: most sequences that it
    computes at once. refused: it has just refused a request as full. pages_free: unused pages. token_s: seconds per
    token until a prompt's KV is there; compute_s: seconds per token to compute it; sequence_s: seconds that a sequence
    adds to each step; 0: not measured. step_tokens: most tokens of one step; 0: not known. fetch_s: seconds per token
    until the KV of a prompt has come from another worker; step_s: seconds of a step that only decodes, beside
    sequence_s for each sequence; 0: not measured. chunk_tokens: tokens of a step in which sequences decode beside
    prompts; 0: not known. tokens_per_s: of prompts that it was given to compute lately, by any router; recent_per_s: in
    the last second or so.
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
    fetch_s: float = 0.0
    step_s: float = 0.0
    chunk_tokens: int = 0
    tokens_per_s: float = 0.0
    recent_per_s: float = 0.0

    def places(self, n: int) -> int:
        """How many of a prompt's n sequences it computes at once."""
        return places(n, self.max_running)

    def has_room(self, n: int = 1) -> bool:
        """Whether there is room for `places(n)` sequences now."""
        return not self.refused and self.sequences + self.places(n) <= self.max_running

    @property
    def wait_s(self) -> float:
        """Seconds until its backlog is computed; 0 if its speed is not known."""
        return wait_s(self, self.compute_s)

    @property
    def fed(self) -> bool:
        """Whether it has steps full of prompts to compute. Less, and it could end them before the next one comes."""
        return 0 < STEPS_AHEAD * self.step_tokens <= self.backlog


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it.

    target: host:port. holds: digests of pages that it has cached, or will have soon. kv_cache: the form of its pages.
    """

    target: str
    state: WorkerState
    load: Load
    holds: Container[int] = frozenset()
    kv_cache: str = "plain"


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a request. reason: one word. cached_tokens: tokens of the prompt that it has probably cached."""

    target: str
    reason: str
    cached_tokens: int = 0


class Policy(Protocol):
    """Ranks workers."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """Workers that can take the request, the best first, the others as alternates; those without room last."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The workers of a request. decode: its decode worker. prefill: prefill workers; the first one computes it.

    way: where workers of both roles are: `here` if the decode worker computes the prompt, else `apart`; and why. split:
    how many of them compute prompts at present, None if all do.
    """

    decode: Placement
    prefill: Sequence[Placement]
    way: tuple[str, str] | None = None
    split: int | None = None

    @property
    def computed_tokens(self) -> int:
        """Cached tokens of the worker that computes the prompt."""
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
    """The best workers with room for a request now; None if it has to wait.

    urgent: it is its client's only prompt that is not computed yet; then it waits for no other client's prompts.
    spare_s: longest further wait in seconds for a prefill worker; beyond it an idle decode worker computes the prompt.
    """
    loads = {each.target: each.load for each in (*decode, *prefill)}
    roomy = [each for each in policy.rank(request, decode) if loads[each.target].has_room(request.n)]
    if not roomy:
        return None
    # A prefill worker samples one token.
    others = [] if request.local else policy.rank(replace(request, n=1, output_tokens=0), prefill)
    computing = others or roomy[:1]
    in_time = [each for each in computing if not loads[each.target].fed]
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
    """The first decode worker with time for a prompt that would finish it no later than the prefill worker."""
    busy = loads[prefill.target]
    there = busy.wait_s + (request.prompt_tokens - prefill.cached_tokens) * busy.compute_s
    for each in decode:
        load, missing = loads[each.target], request.prompt_tokens - each.cached_tokens
        here = (load.backlog + missing) * (load.compute_s or busy.compute_s)
        if load.chunk_tokens:  # sequences that decode there have their part of each step
            here += (load.backlog + missing) / load.chunk_tokens * (load.step_s / 2 + load.sequences * load.sequence_s)
        if not load.fed and here <= there:
            return each
    return None


def places(n: int, max_running: int) -> int:
    """How many of a prompt's n sequences a worker computes at once; an eighth of its room is left to other prompts."""
    return min(n, max_running - max_running // 8)


class _Judged(Protocol):
    @property
    def state(self) -> WorkerState: ...


J = TypeVar("J", bound=_Judged)


def able(candidates: Collection[J]) -> list[J]:
    """Healthy workers; failing ones if none is healthy."""
    healthy = [each for each in candidates if each.state is WorkerState.HEALTHY]
    return healthy or [each for each in candidates if each.state is WorkerState.FAILING]


def suitable(kv_cache: str, decode: Sequence[Candidate]) -> list[Candidate]:
    """Decode workers whose pages serve a request that asks for `kv_cache`, in whatever state."""
    return [candidate for candidate in decode if suits(candidate.kv_cache, kv_cache)]


def cached_tokens(request: PlacementRequest, candidate: Candidate) -> int:
    """Tokens of the prompt whose KV the worker has cached: leading pages. The last token is always computed."""
    pages = 0
    for digest in request.pages:
        if digest not in candidate.holds:
            break
        pages += 1
    return min(pages * request.page_size, request.prompt_tokens - 1)


class LeastLoad:
    """The worker with the fewest sequences; ties go to the most free pages, then to the earlier configured."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        found = sorted(able(candidates), key=lambda each: _busy(request, each))
        return [Placement(each.target, "load", cached_tokens(request, each)) for each in found]


class RoundRobin:
    """One worker after the other, whatever their load."""

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        ready = able(candidates)
        first = request.number % len(ready) if ready else 0
        turned = ready[first:] + ready[:first]
        turned.sort(key=lambda each: not each.load.has_room(request.n))
        return [Placement(each.target, "turn", cached_tokens(request, each)) for each in turned]


class PowerOfTwo:
    """The less busy of two random workers: with many workers nearly as even as the least busy of all.

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
    """The worker that would give the first token soonest: its backlog, plus the part of the prompt it has not cached.

    Both count in seconds, so a popular prefix attracts requests to a worker only while waiting there is cheaper than
    computing the prefix elsewhere. Ties are broken by the prompt's first page: requests that begin alike meet even
    before any worker has their prefix.
    """

    def rank(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> list[Placement]:
        """See Policy."""
        ready = able(candidates)
        if not ready:
            return []
        token_s = known([each.load.token_s for each in ready], USUAL_TOKEN_S)
        sequence_s = known([each.load.sequence_s for each in ready], USUAL_SEQUENCE_S)
        held = [cached_tokens(request, each) for each in ready]
        costs = [
            (request.prompt_tokens - held[place]) * token_s[place]
            + wait_s(each.load, token_s[place])
            + each.load.sequences * sequence_s[place] * request.output_tokens
            for place, each in enumerate(ready)
        ]

        full = [not each.load.has_room(request.n) for each in ready]
        ties = [(each.load.sequences, lot(request, each.target)) for each in ready]
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


def known(measured: Sequence[float], usual: float) -> list[float]:
    """The values, with the mean of the measured ones for workers without a measurement."""
    some = [each for each in measured if each > 0]
    mean = sum(some) / len(some) if some else usual
    return [each if each > 0 else mean for each in measured]


def wait_s(load: Load, token_s: float) -> float:
    """Seconds that a prompt waits there for those before it."""
    return max(0.0, load.backlog * token_s - load.computing_s)


def lot(request: PlacementRequest, target: str) -> int:
    """Breaks ties between workers in the same way for all prompts that begin alike (rendezvous hashing)."""
    seed = request.pages[0] if request.pages else request.draw
    mixed = (_number(target) ^ seed) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF


@lru_cache(4096)
def _number(target: str) -> int:
    return zlib.crc32(target.encode())
