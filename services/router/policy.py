"""Who gets a request: pure decisions over what workers said of themselves. No clocks, no network."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvrail.wire.v1 import common_pb2


class WorkerState(StrEnum):
    """What the router thinks of a worker."""

    UNKNOWN = "unknown"  # has not answered yet
    HEALTHY = "healthy"
    DRAINING = "draining"  # finishes what it has
    FAILING = "failing"  # answers, and fails what it is asked
    DOWN = "down"
    INCOMPATIBLE = "incompatible"  # serves another model


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is.

    running, waiting: what it reported. sent: requests that this router has sent since. max_running, max_waiting: its
    limits; pages_free: pages that nothing holds.
    """

    running: int = 0
    waiting: int = 0
    sent: int = 0
    max_running: int = 0
    max_waiting: int = 0
    pages_free: int = 0

    @property
    def total(self) -> int:
        """Requests that a new one would share the worker with."""
        return self.running + self.waiting + self.sent

    @property
    def full(self) -> bool:
        """Whether a new request would probably be refused."""
        return self.total >= self.max_running + self.max_waiting


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it; target: host:port."""

    target: str
    state: WorkerState
    load: Load


def order_workers(candidates: Iterable[Candidate]) -> list[str]:
    """Targets of the healthy workers, the best first, the others as alternates; failing ones where none is healthy.

    Workers with room go before full ones, then the least loaded, then the one with most free pages; equals keep the
    order of the configuration.
    """
    everyone = list(candidates)
    able = [candidate for candidate in everyone if candidate.state is WorkerState.HEALTHY]
    able = able or [candidate for candidate in everyone if candidate.state is WorkerState.FAILING]
    able.sort(key=lambda c: (c.load.full, c.load.total, -c.load.pages_free))
    return [candidate.target for candidate in able]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker serves."""

    model: str
    fingerprint: str
    protocol_version: int


def choose_fingerprint(current: str, decode: Sequence[str], prefill: Sequence[str]) -> str:
    """The fingerprint that the cluster serves: of most decode workers; ties go to the current one, then to the earlier.

    decode, prefill: fingerprints of the workers that answer, in the order of the configuration. Without decode workers
    nothing is served, so prefill workers decide only what is said until one comes: in an upgrade they may go first.
    """
    seen = decode or ([] if current else prefill)
    if not seen:
        return current
    return max(dict.fromkeys(seen), key=lambda fingerprint: (seen.count(fingerprint), fingerprint == current))


def page_mismatch(prefill: common_pb2.KVLayout, decode: Sequence[common_pb2.KVLayout]) -> str:
    """Why no decode worker could take a prefill worker's pages; empty where one can, or none has answered."""
    if not decode or prefill in decode:
        return ""
    name = next(
        field.name for field in prefill.DESCRIPTOR.fields if any(_differ(prefill, d, field.name) for d in decode)
    )
    theirs = ", ".join(sorted({str(getattr(layout, name)) for layout in decode}))
    return (
        f"has KV pages of {name} {getattr(prefill, name)}, decode workers of {theirs}; run both with the same settings"
    )


def codec_mismatch(prefill: Mapping[str, int], decode: Sequence[Mapping[str, int]]) -> str:
    """Why some codec of a prefill worker would be of no use to any decode worker; empty where all would be.

    prefill, decode: the number of each codec's parameters, by worker.
    """
    for name, ours in prefill.items():
        theirs = [codecs[name] for codecs in decode if name in codecs]
        if theirs and ours not in theirs:
            known = ", ".join(sorted({f"{number:016x}" for number in theirs}))
            return (
                f"has parameters {ours:016x} of codec {name!r}, decode workers {known}; "
                "run both with the same codebook file and the same version"
            )
    return ""


def _differ(one: common_pb2.KVLayout, other: common_pb2.KVLayout, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def incompatibility(identity: Identity, *, model: str, fingerprint: str, protocol_version: int) -> str:
    """Why a worker must not get requests of this cluster; empty where it fits."""
    if identity.protocol_version != protocol_version:
        return f"speaks protocol {identity.protocol_version}, the router {protocol_version}; run one version everywhere"
    if identity.model != model:
        return f"serves model {identity.model!r}, the router {model!r}; give both the same served-model-name"
    if identity.fingerprint != fingerprint:
        return (
            f"has model fingerprint {identity.fingerprint[:16]!r}, other workers {fingerprint[:16]!r}; "
            "load the same weights and configuration on every worker"
        )
    return ""
