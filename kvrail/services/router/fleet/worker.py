"""One worker as the router knows it: its channel, its last status, and this router's requests there."""

from collections.abc import Sequence
from time import monotonic
from typing import Any

import grpc.aio

from kvrail.errors import IncompatibleError, KvrailError
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient, PrefillStatusClient, StatusClient
from kvrail.runtime.breaker import Breaker
from kvrail.security.tls import Tls
from kvrail.services.router.fleet.demand import RECENT_S, DemandClock, TokenRate
from kvrail.services.router.fleet.policy import Candidate, Load, WorkerState
from kvrail.services.router.fleet.prefixes import PAGES_A_LOOK, WorkerPages
from kvrail.wire.checks import check_status
from kvrail.wire.v1 import common_pb2

NOT_ASKED = "has not answered yet"
STATUS_TIMEOUT_S = 3.0
"""A worker whose status takes longer counts as lost."""


class Worker:
    """One worker: its channel, its last status, and this router's requests there.

    requests: our prompts there; backlog: their tokens that are still to be computed. refused: it has refused a request
    as full, and nothing has changed since. pages: the pages that it has cached. leaving: no name has its address any
    more; it gets no new requests. answered: whether it has ever answered. wrong: its last answer cannot be. instance:
    the number of the process that answered last; 0: none yet. queried, hit: tokens looked up and found in its prefix
    cache between its last two statuses.
    """

    def __init__(
        self, role: str, target: str, channel: grpc.aio.Channel, client: StatusClient, clock: DemandClock
    ) -> None:
        self.role = role
        self.target = target
        self.channel = channel
        self.state = WorkerState.STARTING
        self.detail = NOT_ASKED
        self.answer: common_pb2.WorkerStatus | None = None
        self.failure, self.wrong = "", False
        self.answered = self.leaving = False
        self.breaker = Breaker()
        self.vocab_size, self.kv_cache = 0, ""  # in its last status
        self.instance = 0
        self._last_answer = monotonic()
        self._client = client
        self.requests = self.backlog = 0
        self._began = 0.0  # when it began with the backlog
        self._clock = clock
        self._given = TokenRate(clock)  # tokens of our prompts
        self._computed = TokenRate(clock)  # of all routers' prompts, as its statuses count them
        self._report = common_pb2.WorkerReport()  # the last
        self.queried = self.hit = 0
        self.refused = False
        self.pages = WorkerPages()
        self._sequences = self._places = 0  # of our requests; places: computed at once
        self._most = 0  # of our sequences, that its last status may have counted
        self._others = 0  # sequences of other routers

    def __str__(self) -> str:
        return f"{self.role} worker {self.target}".removeprefix("both ")

    async def ask(self) -> None:
        """Ask for the worker's status. Requests of ours may come and end while it answers."""
        self._most = self._sequences
        try:
            answer = await self._client.get_status(self.pages.question(), timeout_s=STATUS_TIMEOUT_S)
            check_status(answer, PAGES_A_LOOK)
            self._take_changes(answer)
        except KvrailError as error:
            self.lost(str(error), wrong=isinstance(error, IncompatibleError))
            return
        self._others = max(0, answer.running + answer.waiting - self._most)
        answer.ClearField("kv_events")
        self.answer, self.failure, self.refused = answer, "", False
        self.vocab_size, self.kv_cache = answer.model.vocab_size, answer.kv_cache
        self.answered, self._last_answer = True, monotonic()

    def _take_changes(self, answer: common_pb2.WorkerStatus) -> None:
        """Take in KV events and tokens since the last status; a new process starts with none.

        Raises IncompatibleError for too many pages.
        """
        known, now = answer.instance == self.instance, answer.report
        before, self._report = self._report if known else now, now
        if not known:
            self.instance, self.breaker = answer.instance, Breaker()
        elif now.prompt_tokens > before.prompt_tokens:
            self._computed.add(now.prompt_tokens - before.prompt_tokens, whole=True)
        self.queried = max(0, now.prefix_queried_tokens - before.prefix_queried_tokens)
        self.hit = max(0, now.prefix_hit_tokens - before.prefix_hit_tokens)
        if known and answer.HasField("kv_events"):
            self.pages.take(answer.kv_events, answer.pages_total)
        else:
            self.pages.forget()

    @property
    def silent_s(self) -> float:
        """Seconds since its last status."""
        return monotonic() - self._last_answer

    def lost(self, reason: str, *, wrong: bool = False) -> None:
        """The worker did not answer; wrong: it did, with what cannot be."""
        self.answer, self.failure, self.wrong = None, reason, wrong

    @property
    def numerics(self) -> str:
        """Workers with the same value compute the same bits; empty if the worker is not batch-invariant."""
        return "" if self.answer is None else self.answer.model.numerics

    def take(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """A prompt goes to this worker. places: how many of its sequences are computed at once."""
        self.requests += 1
        self._clock.begin()
        self._sequences += sequences
        self._places += places
        self._most = max(self._most, self._sequences)
        self.pages.expect(pages)

    def compute(self, tokens: int) -> None:
        """It is to compute `tokens` tokens of a prompt."""
        if not self.backlog:
            self._began = monotonic()
        self.backlog += tokens
        self._given.add(tokens)

    def computed(self, tokens: int) -> None:
        """It has computed them, or need not any more; it begins with the next."""
        self.backlog -= tokens
        self._began = monotonic()

    def leave(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """A prompt has ended there, or is lost."""
        self.requests -= 1
        self._clock.end()
        self._sequences -= sequences
        self._places -= places
        self.pages.settle(pages)

    def load(self, *, computes: bool = True) -> Load:
        """How busy it is. computes: whether it computes its prompts itself."""
        if self.answer is None:
            return Load()
        answer, costs = self.answer, self.answer.step_cost
        return Load(
            requests=self.requests,
            sequences=self._places + self._others,
            backlog=self.backlog,
            computing_s=monotonic() - self._began if self.backlog else 0.0,
            max_running=answer.max_running,
            refused=self.refused,
            pages_free=answer.pages_free,
            token_s=costs.prefill_each if computes else costs.fetch_each,
            # A decode worker's rate for a few tokens beside many sequences is none for a whole prompt.
            compute_s=costs.prefill_full or (costs.prefill_each if computes else 0.0),
            sequence_s=costs.decode_each,
            step_tokens=answer.max_batch_tokens,
            fetch_s=costs.fetch_each,
            step_s=costs.decode_base,
            chunk_tokens=answer.mixed_batch_tokens,
            tokens_per_s=max(self._given.read(), self._computed.read()),
            recent_per_s=max(self._given.read(RECENT_S), self._computed.read(RECENT_S)),
        )

    async def close(self) -> None:
        """Close the channel, which ends what still runs on it."""
        await self.channel.close()

    def candidate(self, *, computes: bool = True) -> Candidate:
        """The worker as the policy sees it."""
        return Candidate(self.target, self.state, self.load(computes=computes), self.pages, self.kv_cache)

    def describe(self) -> dict[str, Any]:
        """The worker's entry in /health."""
        entry: dict[str, Any] = {"state": self.state.value}
        if self.detail:
            entry["detail"] = self.detail
        if self.answer is not None:
            for field in ("running", "waiting", "pages_total", "pages_free", "pages_cached"):
                entry[field] = getattr(self.answer, field)
            entry["codecs"] = list(self.answer.codecs)
            entry["kv_cache"] = self.kv_cache
            entry["invariant"] = bool(self.numerics)
            entry["numerics"] = self.numerics or None
        return entry


class DecodeWorker(Worker):
    """A worker that generates."""

    def __init__(self, target: str, tls: Tls | None, clock: DemandClock, role: str = "decode") -> None:
        channel = open_channel(target, tls=tls, role="decode")
        self.client = DecodeClient(channel, peer=f"{role} worker {target}".removeprefix("both "))
        super().__init__(role, target, channel, self.client, clock)

    async def close(self) -> None:
        """End what still runs, then close the channel."""
        await self.client.close()
        await super().close()


class PrefillWorker(Worker):
    """A worker that decode workers call; the router only reads its status."""

    def __init__(self, target: str, tls: Tls | None, clock: DemandClock) -> None:
        channel = open_channel(target, tls=tls, role="prefill")
        client = PrefillStatusClient(channel, peer=f"prefill worker {target}")
        super().__init__("prefill", target, channel, client, clock)


class BothWorker(DecodeWorker):
    """A worker that prefills and decodes: one load for both."""

    def __init__(self, target: str, tls: Tls | None, clock: DemandClock) -> None:
        super().__init__(target, tls, clock, "both")

    @property
    def prefills(self) -> bool:
        """Whether its status says that it prefills."""
        return self.answer is not None and "prefill" in self.answer.roles
