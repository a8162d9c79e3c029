"""Codec `auto`: which exact codec gives the k-th token soonest, from what was measured of link and codecs."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrail.codec.cost import CodecCost
from kvrail.telemetry.worker import TransferMetrics
from kvrail.transfer.peers import Recent
from kvrail.worker.codecs import WITHOUT_CODE

COUNTED_TOKEN = 32
"""The k of the k-th token."""
LEAST_GAIN = 0.03
"""As a share of raw's expected time. For a smaller gain raw is taken: estimates are no better than that."""
WEIGHT = 0.3
"""The newest measurement's weight in a running mean."""
LEAST_PAYLOAD_BYTES = 128 << 10
"""A shorter payload fits into the buffers of its ends, and seems to cross in no time."""
LEAST_SAMPLE_BYTES = 256 << 10
"""A transfer of fewer bytes says nothing about the link."""
SAMPLES = 8
"""Transfers that tell a link's rate: those of the last few requests."""
FADE = 0.7
"""Weight of a transfer beside the next one: the last two outvote all before, the last one alone does not."""
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


@dataclass(slots=True)
class LinkSample:
    """What one transfer says of the link: bytes of its payloads, and the seconds in which they crossed."""

    payload_bytes: int = 0
    seconds: float = 0.0

    def add(self, payload_bytes: int, crossing_s: float) -> None:
        """Count a payload that crossed in `crossing_s` seconds (`Region`). A short one would measure buffers."""
        if payload_bytes >= LEAST_PAYLOAD_BYTES and crossing_s > 0:
            self.payload_bytes += payload_bytes
            self.seconds += crossing_s


def link_rate(samples: Sequence[LinkSample]) -> float:
    """Bytes a second of a link: the median of its samples, oldest first, where each counts with its bytes and its age.

    So neither a transfer that stood still nor a short one that a shaper let through in a burst decides alone, and a
    link that has changed is known as such after two transfers.
    """
    newest = len(samples) - 1
    weights = {sample.payload_bytes / sample.seconds: 0.0 for sample in samples}
    for place, sample in enumerate(samples):
        weights[sample.payload_bytes / sample.seconds] += sample.payload_bytes * FADE ** (newest - place)
    half = sum(weights.values()) / 2
    for rate in sorted(weights):
        half -= weights[rate]
        if half <= 0:
            return rate
    raise ValueError("a link without samples has no rate; observe one first")


class Chooser:
    """Keeps the running means behind `choose`. Belongs to one event loop.

    costs: of the codecs to choose from, filled as they are measured. fallback: taken while a link is not known, or
    what it costs to send plain bytes.
    """

    def __init__(self, metrics: TransferMetrics, max_drafts: int, fallback: str) -> None:
        self._metrics = metrics
        self._max_drafts = max_drafts
        self._fallback = fallback
        self._samples: Recent[str, deque[LinkSample]] = Recent()
        self._links: Recent[str, float] = Recent(metrics.link_forgotten)
        self._step_s = FIRST_STEP_S
        self._acceptance = FIRST_ACCEPTANCE
        self.costs: dict[str, CodecCost] = {}

    def choose(self, worker: str, raw_bytes: int) -> Choice:
        """The codec for a transfer of `raw_bytes` from a prefill worker; counted."""
        choice = self._best(worker, raw_bytes, self.costs)
        self._metrics.codec_chosen(choice.codec, choice.reason)
        return choice

    def meanwhile(self, worker: str, raw_bytes: int, usable: Callable[[str], bool]) -> str:
        """Name of what `choose` would take if there were only codecs that are usable."""
        costs = {name: cost for name, cost in self.costs.items() if usable(name)}
        return self._best(worker, raw_bytes, costs).codec

    def _best(self, worker: str, raw_bytes: int, costs: Mapping[str, CodecCost]) -> Choice:
        link = self._links.get(worker)
        if link is None:
            return Choice(self._fallback, "link_unknown", f"the link to {worker} has not been measured yet")
        if WITHOUT_CODE not in costs:
            return Choice(self._fallback, "costs_unknown", "the codecs have not been measured yet")
        at = Situation(raw_bytes, link, self._step_s, self._max_drafts, self._acceptance)
        return choose(costs, at)

    def link_bytes_per_s(self, worker: str) -> int:
        """Rate of the link from a prefill worker; 0 where it has not been measured yet."""
        return int(self._links.get(worker, 0))

    def mean_link_s(self) -> float:
        """Seconds that a byte takes, over all links from prefill workers that were measured; 0 where none was."""
        return sum(1 / rate for rate in self._links.values()) / len(self._links) if self._links else 0.0

    def observe_link(self, worker: str, sample: LinkSample) -> None:
        """Learn from a transfer, whether or not it came to its end."""
        samples = self._samples.get(worker, deque(maxlen=SAMPLES))
        if sample.payload_bytes >= LEAST_SAMPLE_BYTES:
            samples.append(sample)
        if samples:
            self._samples[worker] = samples
            self._links[worker] = link_rate(samples)
            self._metrics.link_measured(worker, self._links[worker])

    def observe_steps(self, seconds: float, steps: int) -> None:
        """Learn from `steps` decode steps of a request."""
        if steps > 0:
            self._step_s = _mean(self._step_s, max(seconds / steps, 1e-6))

    def observe_drafts(self, proposed: int, accepted: int) -> None:
        """Learn from a request's drafts."""
        if proposed:
            self._acceptance = _mean(self._acceptance, accepted / proposed)


def _mean(before: float, new: float) -> float:
    return (1 - WEIGHT) * before + WEIGHT * new
