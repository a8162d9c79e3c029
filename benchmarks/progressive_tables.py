"""The tables of benchmarks/progressive.py."""

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from benchmarks.anchor_drafts import DEMO
from benchmarks.codec_tables import Table
from benchmarks.progressive_client import Trace
from kvrail.telemetry.moments import PARTS
from kvrail.text import load_tokenizer

COUNTED = (2, 8, 32, 64)
"""Tokens of an answer whose time is shown, beside the first."""
LYNX_TABLE_1 = {"raw": "4.4, 5.9", "int8": "2.3, 3.8", "int4": "1.4, 2.9", "lynx": "1.6, 3.4"}
"""Lynx's own figures: seconds to the first and the 32nd token, 16K tokens, Qwen 32B."""
LYNX_SETTING = ("qwen3-32b", 16384)
ONE_STAGE = "splitzip"
"""The codec of one stage to compare with, beside the first."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """accepted: drafts of each context; bits: a value of KV, over all stages, as they travelled."""

    accepted: list[int]
    bits: float


def median(traces: Sequence[Trace], moment: Callable[[Trace], float]) -> float:
    """Statistics of a time, over prompts."""
    return statistics.median(moment(trace) for trace in traces)


def first_difference(text: str, other: str) -> int:
    """Number, from 1, of the first token in which two different texts differ."""
    tokenizer = load_tokenizer(str(DEMO))
    ids, others = (tokenizer.encode(each, add_special_tokens=False) for each in (text, other))
    same = [left == right for left, right in zip(ids, others, strict=False)]
    return 1 + (same.index(False) if False in same else len(same))


def times_table(
    length: int,
    rate: str,
    answers: dict[str, list[Trace]],
    *,
    unlike: Collection[str] = (),
    words: bool = True,
    notes: str = "",
) -> Table:
    """Medians of one length and rate.

    unlike: codecs whose texts are not compared. words: whether texts are the demo model's, and differ at some token.
    notes: said below, too.
    """
    base = next(iter(answers.values()))
    rows = []
    for codec, traces in answers.items():
        verified = [f"{median(traces, lambda t, k=k: t.verified_at(k)):.3f}" for k in (1, *COUNTED)]
        drafts = any(trace.usage["drafts_proposed"] for trace in traces)
        shown = [f"{median(traces, lambda t, k=k: t.shown_at(k)):.3f}" if drafts else "" for k in COUNTED]
        proposed, accepted = (
            statistics.mean(trace.usage[f"drafts_{kind}"] for trace in traces) for kind in ("proposed", "accepted")
        )
        equal = [trace.text == truth.text for trace, truth in zip(traces, base, strict=True)]
        pairs = [(t.text, b.text) for t, b in zip(traces, base, strict=True) if words and t.text != b.text]
        apart = [] if codec in unlike else [first_difference(*pair) for pair in pairs]
        taken = ", ".join(dict.fromkeys(trace.usage["codec"] for trace in traces))
        name = codec if taken == codec else f"{codec}: {taken}"
        counts = [f"{proposed:.1f}", f"{accepted:.1f}"] if drafts else ["", ""]
        different = f"{statistics.median(apart):g}" if apart else ""
        megabytes = median(traces, lambda trace: trace.usage["kv_bytes"]) / 1e6
        rate_reached = median(traces, lambda t: 8e-9 * t.usage["kv_bytes"] / t.verified_at(2))
        sent = [f"{megabytes:.1f}", f"{rate_reached:.3f}"]
        same = "" if codec in unlike else f"{sum(equal)} of {len(equal)}"
        rows.append([name, *verified, *shown, *counts, *sent, same, different])
    header = (
        "codec",
        "first token",
        *(f"{k} verified" for k in COUNTED),
        *(f"{k} shown" for k in COUNTED),
        "drafts",
        "accepted",
        "MB",
        "Gb/s",
        "same text",
        "first different token",
    )
    measured = (
        f"{len(base)} prompts, codecs in turn, after one more with each that is not counted; drafts and accepted are"
        " means. Gb/s: of KV as it travels, until token 2 is verified."
    )
    return Table(f"{length:,} tokens at {rate}", header, rows, f"{measured} {notes}".strip())


def ratio_table(length: int, rate: str, answers: dict[str, list[Trace]]) -> Table:
    """The same times over those of the first codec, and over those of ONE_STAGE."""
    base = next(iter(answers))
    peers = [name for name in dict.fromkeys((base, ONE_STAGE)) if name in answers]
    moments: dict[str, Callable[[Trace], float]] = {"2 shown": lambda trace: trace.shown_at(2)}
    for k in COUNTED[1:]:
        moments[f"{k} verified"] = lambda trace, k=k: trace.verified_at(k)
    rows = []
    for codec, traces in answers.items():
        cells = [
            f"{median(traces, moment) / median(answers[peer], moment):.2f}"
            for peer in peers
            for moment in moments.values()
        ]
        rows.append([codec, *cells])
    header = ("codec", *(f"{name}, over {peer}" for peer in peers for name in moments))
    return Table(f"{length:,} tokens at {rate}, times over others'", header, rows, "Medians over medians.")


def lynx_table(length: int, rate: str, answers: dict[str, list[Trace]], shape: str) -> Table:
    """Medians of Lynx's TTKT: a draft counts from when it was made if it was accepted."""
    paper = LYNX_TABLE_1 if (shape, length) == LYNX_SETTING else {}
    rows = [
        [codec, *(f"{median(traces, lambda t, k=k: t.kept_at(k)):.3f}" for k in COUNTED), paper.get(codec, "")]
        for codec, traces in answers.items()
    ]
    header = ("codec", *(f"{k} kept" for k in COUNTED), "Lynx's Table 1: TTFT, TT32T")
    notes = (
        "Time-to-k-th-token as Lynx counts it (section 6.1): an accepted draft counts from when it was made. Ours"
        " begins with the request, Lynx's with decoding; our second token is the first that needs the KV, as Lynx's"
        " first is."
    )
    return Table(f"{length:,} tokens at {rate}, accepted drafts counted when made", header, rows, notes)


def parts_table(length: int, rate: str, answers: dict[str, list[Trace]]) -> Table:
    """Where the time goes, as Lynx's figure 2: medians of the parts of a request's life."""
    names = [name for name, _, _ in PARTS]
    rows = []
    for codec, traces in answers.items():
        parts = [
            f"{median(traces, lambda t, name=name: t.usage['stage_seconds'].get(name, 0.0)):.3f}" for name in names
        ]
        rows.append([codec, *parts])
    notes = (
        "Medians of seconds, each by itself. kv_wait: from the first token to the coarse KV, which is all of it with"
        " codecs of one stage; draft: from there to the exact KV; verify: until the drafts are judged."
    )
    return Table(f"{length:,} tokens at {rate}, where the time goes", ("codec", *names), rows, notes)
