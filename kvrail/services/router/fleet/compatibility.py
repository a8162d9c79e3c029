"""Which workers fit a cluster and each other: pure functions of their status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrail.wire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker serves."""

    model: str
    fingerprint: str
    protocol_version: int


def choose_fingerprint(current: str, decode: Sequence[str], prefill: Sequence[str]) -> str:
    """The fingerprint that the cluster serves: that of most decode workers; ties go to the current one, then the first.

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
    fields = {field.name: {getattr(layout, field.name) for layout in decode} for field in prefill.DESCRIPTOR.fields}
    name = next((name for name, values in fields.items() if values != {getattr(prefill, name)}), "")
    if not name:
        return "has KV pages unlike decode workers' in what this router does not know; run one version everywhere"
    theirs = ", ".join(sorted(map(str, fields[name])))
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
