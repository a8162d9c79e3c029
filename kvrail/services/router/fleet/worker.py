"""One worker as the router knows it: its channel, what it last said, and what it has of this router."""

from collections.abc import Sequence
from time import monotonic
from typing import Any, Protocol

import grpc.aio

from kvrail.errors import KvrailError
from kvrail.rpc.channel import open_channel
from kvrail.rpc.client import DecodeClient, PrefillStatusClient
from kvrail.runtime.breaker import Breaker
from kvrail.security.tls import Tls
from kvrail.services.router.fleet.policy import Candidate, Load, WorkerState
from kvrail.services.router.fleet.prefixes import PAGES_A_LOOK, WorkerPages
from kvrail.wire.checks import check_status
from kvrail.wire.v1 import common_pb2

NOT_ASKED = "has not answered yet"
STATUS_TIMEOUT_S = 3.0
"""A worker that does not say how it is for so long counts as lost."""


class StatusClient(Protocol):
    """The one call that both kinds of worker answer alike."""

    async def get_status(self, asked: common_pb2.StatusRequest, *, timeout_s: float) -> common_pb2.WorkerStatus:
        """Ask for identity, limits and load, and for news of pages."""


class Worker:
    """One worker: its channel, what it last said, and what it has of this router.

    requests: prompts that it has of us, backlog: their tokens that it has still to compute. refused: it has said that
    it is full, and nothing has changed since. pages: those that it holds. leaving: no name has its address any more; it
    gets nothing new.
    """

    def __init__(self, role: str, target: str, channel: grpc.aio.Channel, client: StatusClient) -> None:
        self.role = role
        self.target = target
        self.channel = channel
        self.state = WorkerState.STARTING
        self.detail = NOT_ASKED
        self.answer: common_pb2.WorkerStatus | None = None
        self.failure = ""
        self.heard = self.leaving = False  # heard: ever
        self.breaker = Breaker()
        self.vocab_size = 0  # as it said last
        self._instance = 0
        self._last_heard = monotonic()
        self._client = client
        self.requests = self.backlog = 0
        self._began = 0.0  # with the first of the backlog
        self.refused = False
        self.pages = WorkerPages()
        self._sequences = self._places = 0  # of our requests; the second: computed at once
        self._most = 0  # sequences of ours that it may have counted at its last answer
        self._others = 0  # of other routers

    async def ask(self) -> None:
        """Ask the worker how it is; what it had of us then may have ended, or come, while it answered."""
        self._most = self._sequences
        try:
            answer = await self._client.get_status(self.pages.question(), timeout_s=STATUS_TIMEOUT_S)
            check_status(answer, PAGES_A_LOOK)
            self._take_pages(answer)
        except KvrailError as error:
            self.lost(str(error))
            return
        self._others = max(0, answer.running + answer.waiting - self._most)
        answer.ClearField("kv_events")
        self.answer, self.failure, self.refused = answer, "", False
        self.vocab_size = answer.model.vocab_size
        self.heard, self._last_heard = True, monotonic()

    def _take_pages(self, answer: common_pb2.WorkerStatus) -> None:
        """Take in the news of its pages; a new process owes nothing. Raises IncompatibleError for too many."""
        known = answer.instance == self._instance
        if not known:
            self._instance, self.breaker = answer.instance, Breaker()
        if known and answer.HasField("kv_events"):
            self.pages.take(answer.kv_events, answer.pages_total)
        else:
            self.pages.forget()

    @property
    def silent_s(self) -> float:
        """Seconds since it last said how it is."""
        return monotonic() - self._last_heard

    def lost(self, reason: str) -> None:
        """Take note that the worker did not answer."""
        self.answer, self.failure = None, reason

    @property
    def instance(self) -> int:
        """Which start of its process has answered; 0: none yet."""
        return self._instance

    @property
    def numerics(self) -> str:
        """Workers that have the same compute the same bits; empty where bits depend on a batch's company."""
        return "" if self.answer is None else self.answer.model.numerics

    def take(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """A prompt goes to this worker. places: of its sequences, those that are computed at once."""
        self.requests += 1
        self._sequences += sequences
        self._places += places
        self._most = max(self._most, self._sequences)
        self.pages.expect(pages)

    def compute(self, tokens: int) -> None:
        """It is to compute so many tokens of a prompt."""
        if not self.backlog:
            self._began = monotonic()
        self.backlog += tokens

    def computed(self, tokens: int) -> None:
        """It has computed them, or nobody wants it to any more; it begins with the next."""
        self.backlog -= tokens
        self._began = monotonic()

    def leave(self, sequences: int, places: int, pages: Sequence[int]) -> None:
        """It is done there, or lost."""
        self.requests -= 1
        self._sequences -= sequences
        self._places -= places
        self.pages.settle(pages)

    def load(self, *, computes: bool = True) -> Load:
        """How busy it is. computes: whether it computes the prompts that it gets by itself."""
        if self.answer is None:
            return Load()
        answer, pace = self.answer, self.answer.pace
        return Load(
            requests=self.requests,
            sequences=self._places + self._others,
            backlog=self.backlog,
            computing_s=monotonic() - self._began if self.backlog else 0.0,
            max_running=answer.max_running,
            refused=self.refused,
            pages_free=answer.pages_free,
            token_s=pace.prefill_each if computes else pace.fetch_each,
            # Of a decode worker's few tokens beside many sequences nothing follows for a whole prompt.
            compute_s=pace.prefill_full or (pace.prefill_each if computes else 0.0),
            sequence_s=pace.decode_each,
            step_tokens=answer.max_batch_tokens,
        )

    async def close(self) -> None:
        """Close the channel, which ends what still runs on it."""
        await self.channel.close()

    def candidate(self, *, computes: bool = True) -> Candidate:
        """What the policy needs to know."""
        return Candidate(self.target, self.state, self.load(computes=computes), self.pages)

    def describe(self) -> dict[str, Any]:
        """The worker's entry in /health."""
        entry: dict[str, Any] = {"state": self.state.value}
        if self.detail:
            entry["detail"] = self.detail
        if self.answer is not None:
            for field in ("running", "waiting", "pages_total", "pages_free", "pages_cached"):
                entry[field] = getattr(self.answer, field)
            entry["codecs"] = list(self.answer.codecs)
            entry["invariant"] = bool(self.numerics)
            entry["numerics"] = self.numerics or None
        return entry


class DecodeWorker(Worker):
    """A worker that generates."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        channel = open_channel(target, tls=tls, role="decode")
        self.client = DecodeClient(channel, peer=f"decode worker {target}")
        super().__init__("decode", target, channel, self.client)

    async def close(self) -> None:
        """End what still runs, then close the channel."""
        await self.client.close()
        await super().close()


class PrefillWorker(Worker):
    """A worker that decode workers call; the router only looks at its load."""

    def __init__(self, target: str, tls: Tls | None = None) -> None:
        channel = open_channel(target, tls=tls, role="prefill")
        super().__init__("prefill", target, channel, PrefillStatusClient(channel, peer=f"prefill worker {target}"))
