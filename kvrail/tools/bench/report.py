"""The figures of a run, by the names and definitions of `vllm bench serve`, and what only kvrail's servers report."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from kvrail.tools.bench.answers import Answer, Failure, Json
from kvrail.tools.bench.run import Run

LATENCIES = ("ttft", "tpot", "itl", "e2el")
LIMITED = ("ttft", "tpot", "e2el")
"""What a limit of goodput can hold for."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated linearly between the nearest two, as numpy does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


P99 = partial(percentile, percent=99)


def latencies(answers: Iterable[Answer]) -> dict[str, list[float]]:
    """Seconds of each kind; an answer of one token has no time per token after it."""
    found = list(answers)
    return {
        "ttft": [answer.ttft for answer in found],
        "tpot": [answer.tpot for answer in found if answer.tokens > 1],
        "itl": [gap for answer in found for gap in answer.gaps],
        "e2el": [answer.e2el for answer in found],
    }


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether an answer keeps all limits, in milliseconds."""
    return all(1e3 * getattr(answer, name) <= limit for name, limit in limits.items())


def figures(run: Run, limits: Mapping[str, float]) -> Json:
    """All figures of a run. None stands for what is unknown: latencies without answers, goodput without limits."""
    answers, output = run.answers, sum(answer.tokens for answer in run.answers)
    good = sum(is_good(answer, limits) for answer in answers)
    row: Json = {
        "completed": len(answers),
        "failed": len(run.failures),
        "unfinished": run.unfinished,
        "left_out": run.load.trace.left_out if run.load.trace else 0,
        "duration": run.seconds,
        "request_throughput": len(answers) / run.seconds,
        "request_goodput": good / run.seconds if limits else None,
        "output_throughput": output / run.seconds,
        "total_input_tokens": _total(answers, "prompt_tokens"),
        "total_output_tokens": output,
        "cached_input_tokens": sum(
            (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for answer in answers
        ),
        "client_cpu_share": run.cpu_seconds / run.seconds,
    }
    for name, values in latencies(answers).items():
        for kind, value in (("mean", statistics.fmean), ("median", statistics.median), ("p99", P99), ("max", max)):
            row[f"{kind}_{name}_ms"] = 1e3 * value(values) if values else None
    second = [answer.gaps[0] for answer in answers if answer.gaps]
    row["median_first_gap_ms"] = 1e3 * statistics.median(second) if second else None
    row["warnings"] = _warnings(run, row)
    return row | {"failures": _failures(run.failures)} | _crossed([answer.kvrail for answer in answers])


def _warnings(run: Run, row: Json) -> list[str]:
    """What makes a run's figures better than those of its load."""
    shared = run.load.shared_tokens * len(run.answers) / run.load.requests
    known, own = row["cached_input_tokens"] - shared, row["total_input_tokens"] - shared
    if known <= row["total_input_tokens"] / 10:
        return []
    return [f"{known / own:.0%} of what no two prompts share was cached by an earlier run; take another --seed"]


def _total(answers: Iterable[Answer], name: str) -> int:
    return sum(answer.usage.get(name) or 0 for answer in answers)


def _failures(failures: Iterable[Failure]) -> list[Json]:
    """Each kind with its number and one message, the most frequent first."""
    counts = Counter(failure.kind for failure in failures)
    examples = {failure.kind: failure.message for failure in failures}
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]


def _crossed(rows: Sequence[Json]) -> Json:
    """What crossed between workers, where the server is kvrail's: codecs, bytes, and medians of a request's parts."""
    known = [each for each in rows if each]
    if not known:
        return {}
    seconds = [each.get("stage_seconds", {}) for each in known]
    return {
        "codecs": dict(Counter(each.get("codec") or "none" for each in known)),
        "kv_bytes": sum(each.get("kv_bytes", 0) for each in known),
        "kv_raw_bytes": sum(each.get("kv_raw_bytes", 0) for each in known),
        "stage_median_ms": {
            name: 1e3 * statistics.median(each.get(name, 0.0) for each in seconds)
            for name in sorted({name for each in seconds for name in each})
        },
    }


def table(row: Json, limits: Mapping[str, float]) -> str:
    """The figures for people."""
    lines = [
        ("requests that succeeded", f"{row['completed']:,}"),
        ("requests that failed", f"{row['failed']:,}"),
        *([("requests not finished", f"{row['unfinished']:,}")] if row["unfinished"] else []),
        *([("requests left out", f"{row['left_out']:,}, longer than --longest")] if row["left_out"] else []),
        ("duration", f"{row['duration']:.2f} s"),
        ("requests/s", f"{row['request_throughput']:.2f}"),
        ("output tokens/s", f"{row['output_throughput']:,.1f}"),
    ]
    if limits:
        words = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits.items())
        lines.append(("goodput, requests/s", f"{row['request_goodput']:.2f} ({words})"))
    lines += [
        ("prompt tokens", f"{row['total_input_tokens']:,}, of them cached {row['cached_input_tokens']:,}"),
        ("output tokens", f"{row['total_output_tokens']:,}"),
        ("client's share of a core", f"{row['client_cpu_share']:.0%}"),
    ]
    text = [f"{name:<26}{value}" for name, value in lines]
    text += ["", f"{'ms':<26}{'mean':>10}{'median':>10}{'p99':>10}{'max':>10}"]
    for name in LATENCIES:
        cells = (_cell(row[f"{kind}_{name}_ms"]) for kind in ("mean", "median", "p99", "max"))
        text.append(f"{name.upper():<26}{''.join(cells)}")
    text.append(f"{'first to second chunk':<26}{'':>10}{_cell(row['median_first_gap_ms'])}")
    if "codecs" in row:
        codecs = ", ".join(f"{name} {count}" for name, count in row["codecs"].items())
        text += ["", f"codecs: {codecs}; {row['kv_bytes']:,} bytes crossed, {row['kv_raw_bytes']:,} before encoding"]
        parts = ", ".join(f"{name} {value:.1f}" for name, value in row["stage_median_ms"].items())
        text.append(f"parts of a request, median ms: {parts}")
    text += ["", *(f"warning: {each}" for each in row["warnings"])] if row["warnings"] else []
    text += ["", "failures:"] if row["failures"] else []
    text += [f"  {each['count']} × {each['kind']}, for example: {each['example']}" for each in row["failures"]]
    return "\n".join(text) + "\n"


def _cell(value: float | None) -> str:
    return f"{'–' if value is None else f'{value:.1f}':>10}"
