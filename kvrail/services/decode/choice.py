"""Codec `auto`: which exact codec gives the k-th token soonest, from what was measured of link and codecs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from kvrail.codec.cost import CodecCost
from kvrail.metrics import TransferMetrics
from kvrail.services.codecs import WITHOUT_CODE

COUNTED_TOKEN = 32
"""The k of the k-th token."""
LEAST_GAIN = 0.03
"""Of raw's expected time; for less, raw is taken: estimates are no better than that."""
WEIGHT = 0.3
"""Of the newest measurement in a running mean."""
LEAST_SAMPLE_BYTES = 256 << 10
"""A transfer's end with fewer bytes says nothing of the link."""
FIRST_STEP_S = 0.01
"""Time of a decode step before any was measured."""
FIRST_ACCEPTANCE = 0.6
"""Share of drafts that are right before any were verified: what docs/decisions/0006-anchor.md found is 36.8 of 64."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the expected time depends on beside the codec.

    raw_bytes: KV to be sent, uncompressed. link: bytes a second. step_s: seconds of a decode step. acceptance: share of
    drafts that are right.
    """

    raw_bytes: int
    link: float
    step_s: float
    max_drafts: int
    acceptance: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec's name, why it was taken in a word for metrics, and in a sentence for people."""

    codec: str
    reason: str
    sentence: str


def expected_s(cost: CodecCost, at: Situation, k: int = COUNTED_TOKEN) -> float:
    """Seconds from the first token, which does not wait for KV, to the k-th verified one.

    Encoding, wire and decoding overlap, so a stage is there after the slowest of the three. Between first and last
    stage drafts are made, one a step; one more step verifies them and gives a token itself.
    """
    coarse = at.raw_bytes * max(cost.encode_s, cost.stages[0] / at.link, cost.decode_s)
    exact = at.raw_bytes * max(cost.encode_s, sum(cost.stages) / at.link, cost.decode_s)
    drafts = min(at.max_drafts, int((exact - coarse) / at.step_s)) if len(cost.stages) > 1 else 0
    steps = max(1, k - 1 - int(drafts * at.acceptance))
    return exact + steps * at.step_s


def choose(costs: Mapping[str, CodecCost], at: Situation) -> Choice:
    """The codec of least expected time; raw where none is better than it by LEAST_GAIN."""
    times = {name: expected_s(cost, at) for name, cost in costs.items()}
    best = min(times, key=lambda name: times[name])
    raw_s = times[WITHOUT_CODE]
    link = f"{at.raw_bytes / 1e6:.1f} MB of KV at {at.link / 1e6:.1f} MB/s"
    if times[best] > (1 - LEAST_GAIN) * raw_s:
        return Choice(WITHOUT_CODE, "no_gain", f"{link}: token {COUNTED_TOKEN} after {raw_s:.3f} s; no codec gains")
    sentence = f"{link}: token {COUNTED_TOKEN} after {times[best]:.3f} s, with {WITHOUT_CODE} after {raw_s:.3f} s"
    return Choice(best, "fastest", sentence)


@dataclass(frozen=True, slots=True)
class LinkSample:
    """The end of a transfer, when nothing was left to compute: how many payload bytes came in how many seconds.

    waited_s: of these seconds, those in which the receiver had nothing to do.
    """

    payload_bytes: int
    seconds: float
    waited_s: float


class LinkWatch:
    """Watches the frames of one transfer that come after its prompt was computed."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._begin: float | None = None
        self._end = 0.0
        self._bytes = 0
        self._waited_s = 0.0

    def frame(self, payload_bytes: int, waited_s: float) -> None:
        """A frame came now, for which the receiver waited so long; the first opens the window."""
        now = self._clock()
        if self._begin is None:
            self._begin = now
            return
        self._end = now
        self._bytes += payload_bytes
        self._waited_s += waited_s

    def sample(self) -> LinkSample:
        """What was seen so far."""
        return LinkSample(self._bytes, 0.0 if self._begin is None else self._end - self._begin, self._waited_s)


class Chooser:
    """Keeps the running means behind `choose`. Belongs to one event loop.

    costs: of the codecs to choose from, filled as they are measured. fallback: taken while a link is not known, or
    what it costs to send plain bytes.
    """

    def __init__(self, metrics: TransferMetrics, max_drafts: int, fallback: str) -> None:
        self._metrics = metrics
        self._max_drafts = max_drafts
        self._fallback = fallback
        self._links: dict[str, float] = {}
        self._step_s = FIRST_STEP_S
        self._acceptance = FIRST_ACCEPTANCE
        self.costs: dict[str, CodecCost] = {}

    def choose(self, worker: str, raw_bytes: int) -> Choice:
        """The codec for a transfer of `raw_bytes` from a prefill worker; counted."""
        link = self._links.get(worker)
        if link is None:
            sentence = f"the link to {worker} has not been measured yet"
            choice = Choice(self._fallback, "link_unknown", sentence)
        elif WITHOUT_CODE not in self.costs:
            choice = Choice(self._fallback, "costs_unknown", "the codecs have not been measured yet")
        else:
            at = Situation(raw_bytes, link, self._step_s, self._max_drafts, self._acceptance)
            choice = choose(self.costs, at)
        self._metrics.codec_chosen(choice.codec, choice.reason)
        return choice

    def link_bytes_per_s(self, worker: str) -> int:
        """Rate of the link from a prefill worker; 0 where it has not been measured yet."""
        return int(self._links.get(worker, 0))

    def mean_link_s(self) -> float:
        """Seconds that a byte takes, over all links from prefill workers that were measured; 0 where none was."""
        return sum(1 / rate for rate in self._links.values()) / len(self._links) if self._links else 0.0

    def observe_link(self, worker: str, codec: str, sample: LinkSample) -> None:
        """Learn from a transfer. One that its ends held up, not the wire, can only raise the estimate."""
        if sample.payload_bytes < LEAST_SAMPLE_BYTES or sample.seconds <= 0:
            return
        rate = sample.payload_bytes / sample.seconds
        cost = self.costs.get(codec)
        encoder_bound = cost is not None and rate * cost.encode_s > 0.7 * sum(cost.stages)
        known = self._links.get(worker)
        if encoder_bound or sample.waited_s < 0.5 * sample.seconds:
            known = max(rate, known or 0.0)
        else:  # means of seconds per byte: frames too large for a link that has slowed down harm more than small ones
            known = 1 / _mean(known and 1 / known, 1 / rate)
        self._links[worker] = known
        self._metrics.link_measured(worker, known)

    def observe_steps(self, seconds: float, steps: int) -> None:
        """Learn from `steps` decode steps of a request."""
        if steps > 0:
            self._step_s = _mean(self._step_s, max(seconds / steps, 1e-6))

    def observe_drafts(self, proposed: int, accepted: int) -> None:
        """Learn from a request's drafts."""
        if proposed:
            self._acceptance = _mean(self._acceptance, accepted / proposed)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else (1 - WEIGHT) * before + WEIGHT * new
