"""Writes the tables of docs/metrics.md from the metrics themselves: `make docs-metrics`."""

import re
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from kvrail.telemetry.making import show_certificates, show_process, show_worker
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Family, Registry
from kvrail.telemetry.startup import Startup
from kvrail.telemetry.vllm import CLUSTER_METRICS, VLLM_METRICS
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, MemoryMetrics, TransferMetrics

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
MODEL = "m"
PROCESS = (
    ("process_cpu_seconds_total", "counter", "CPU time, user and system."),
    ("process_resident_memory_bytes", "gauge", "Resident memory."),
    ("process_virtual_memory_bytes", "gauge", "Virtual memory."),
    ("process_open_fds", "gauge", "Open files, sockets included."),
    ("process_max_fds", "gauge", "Most files that may be open."),
    ("process_start_time_seconds", "gauge", "When the process began, in seconds since 1970."),
)
"""Of prometheus_client, on Linux."""


def families(registry: Registry) -> dict[str, Family]:
    """A registry's own metrics by name, a counter's without `_total`."""
    return {each.name: each for each in registry.collectors if isinstance(each, Family)}


def router() -> dict[str, Family]:
    """What a router shows."""
    registry = Registry()
    RouterMetrics(registry, MODEL)
    return families(registry)


def worker(*, decodes: bool) -> dict[str, Family]:
    """What a decode or a prefill worker shows."""
    registry = Registry()
    Startup(registry, MODEL, "decode" if decodes else "prefill")
    engine = EngineMetrics(registry, MODEL, receives=decodes, drafts=decodes)
    engine.show_cache(page_size=64, pages=1, kv_dtype="bfloat16", prefix_cache=True, cache_bytes=1)
    about = ("device", "dtype", "kv_cache", "torch", "cuda")
    show_worker(registry, MODEL, role="decode" if decodes else "prefill", **dict.fromkeys(about, ""))
    MemoryMetrics(registry, MODEL, weights=0, kv_cache=0)
    TransferMetrics(registry, MODEL, (), ("received",) if decodes else ("sent",))
    CodecMetrics(registry, MODEL, encodes=not decodes, decodes=decodes)
    return families(registry)


def shown(name: str, kind: str) -> str:
    """A metric's name as /metrics has it."""
    return f"`{name}_total`" if kind == "counter" else f"`{name}`"


def labels(family: Family) -> str:
    """A family's labels beside the model's name, with their values where these are fixed."""
    values: dict[str, list[str]] = {name: [] for name in family.label_names if name != "model_name"}
    for found, _ in family.series():
        for name in values:
            if found[name] not in values[name]:
                values[name].append(found[name])
    fixed = len(values) == 1 and all(len(several) > 1 for several in values.values())
    return ", ".join(f"`{name}`: {', '.join(several)}" if fixed else f"`{name}`" for name, several in values.items())


def table(rows: Iterable[tuple[str, ...]], *heads: str) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def rows(found: Iterable[Family]) -> Iterable[tuple[str, ...]]:
    """Rows of a table of ours."""
    return ((shown(each.name, each.type), each.type, labels(each), each.documentation) for each in found)


def theirs() -> Iterable[tuple[str, ...]]:
    """Rows of the table of vLLM's names."""
    sides = {"router": router(), "decode worker": worker(decodes=True)}
    by_name: dict[str, list[tuple[str, str]]] = {}
    kinds: dict[str, str] = {}
    for row in (*VLLM_METRICS, *CLUSTER_METRICS):
        side, known = next((side, known) for side, known in sides.items() if set(row.sources) <= set(known))
        kinds[row.name] = row.kind or known[row.sources[0]].type
        ours = ", ".join(shown(name, known[name].type) for name in row.sources)
        by_name.setdefault(row.name, []).append((f"{side} (sum)" if row in CLUSTER_METRICS else side, ours))
    for name, several in by_name.items():
        kind = kinds[name]
        yield shown(name, kind), kind, " and ".join(side for side, _ in several), "; ".join(ours for _, ours in several)


def tables() -> dict[str, str]:
    """All tables by the names of their places in the page."""
    decode, prefill = worker(decodes=True), worker(decodes=False)
    every = Registry()
    show_process(every, "", 0)
    show_certificates(every, {"services": datetime.now, "door": datetime.now})
    heads = ("metric", "type", "labels", "what it says")
    own = [
        (
            shown(each.name, each.type),
            each.type,
            labels(each) or ", ".join(map("`{}`".format, each.label_names)),
            each.documentation,
        )
        for each in families(every).values()
    ]
    return {
        "process": table([*own, *((f"`{name}`", kind, "", what) for name, kind, what in PROCESS)], *heads),
        "router": table(rows(router().values()), *heads),
        "both": table(rows(decode[name] for name in decode if name in prefill), *heads),
        "decode": table(rows(decode[name] for name in decode if name not in prefill), *heads),
        "prefill": table(rows(prefill[name] for name in prefill if name not in decode), *heads),
        "vllm": table(theirs(), "vLLM's name", "type", "from", "of"),
    }


def written(page: str) -> str:
    """The page with its tables as they should be."""
    for name, text in tables().items():
        place = re.compile(f"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page, found = place.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
        if found != 1:
            raise SystemExit(f"{PAGE.name} has no place for the table {name}; mark it as those of the others are")
    return page


if __name__ == "__main__":
    before = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(written(before), encoding="utf-8")
    sys.stdout.write(f"{PAGE} is written\n")
