"""Links on which a codec pays: from its measured rates and ratio, by the stage times of SplitZip's Appendix B.

A byte of KV takes 1/E to encode, 1/(r B) on a link of B bytes a second at ratio r, 1/D to decode. Pipelined, a long
transfer takes the slowest of the three; unpipelined, their sum. Without a codec it takes 1/B.
"""

import math
from collections.abc import Sequence

from benchmarks.codec_tables import Table
from benchmarks.codec_trials import Figures

GBITS = (0.1, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0)


def work(figures: Figures) -> float:
    """Seconds for encoding and decoding a GB."""
    return 1 / figures.encode_rate + 1 / figures.decode_rate


def seconds(figures: Figures | None, bandwidth: float, *, pipelined: bool) -> float:
    """For a GB of KV over a link of `bandwidth` GB/s; None: without a codec."""
    if figures is None:
        return 1 / bandwidth
    stages = (1 / figures.encode_rate, 1 / (figures.ratio * bandwidth), 1 / figures.decode_rate)
    return max(stages) if pipelined else sum(stages)


def break_even(denser: Figures, other: Figures | None, *, pipelined: bool) -> float:
    """GB/s of the link below which `denser` is faster than `other`, or than no codec; 0: never, infinite: always."""
    ratio = other.ratio if other else 1.0
    if denser.ratio <= ratio:
        return 0.0
    if pipelined:
        return math.inf if other and slowest(denser) >= slowest(other) else slowest(denser) / ratio
    more_work = work(denser) - (work(other) if other else 0.0)
    return (1 / ratio - 1 / denser.ratio) / more_work if more_work > 0 else math.inf


def hidden(figures: Figures) -> float:
    """GB/s of the link up to which encoding and decoding are hidden behind it (Appendix B)."""
    return slowest(figures) / figures.ratio


def _gbit(rate: float) -> str:
    if rate == 0:
        return "never"
    return "always" if math.isinf(rate) else f"{rate * 8:.1f}"


def slowest(figures: Figures) -> float:
    """GB/s of the slower of encoding and decoding."""
    return min(figures.encode_rate, figures.decode_rate)


def table(found: Sequence[Figures], source: str) -> Table:
    """Break-even bandwidths of codecs, fastest first; `found` is without raw.

    Each is compared with raw and with the next faster one, but for those that another one beats in speed and ratio.
    """
    rows, before = [], None
    for each in sorted(found, key=slowest, reverse=True):
        behind = before is not None and before.ratio >= each.ratio
        against = ["", "", ""]
        if behind:
            against[0] = f"(behind {before.name})"
        elif before:
            pair = (_gbit(break_even(each, before, pipelined=pipelined)) for pipelined in (True, False))
            against = [before.name, *pair]
        alone = [_gbit(hidden(each)), *(_gbit(break_even(each, None, pipelined=how)) for how in (True, False))]
        rows.append([each.name, f"{each.ratio:.3f}", *alone, *against])
        before = before if behind else each
    header = (
        "codec",
        "ratio",
        "hidden up to",
        "beats raw below, pipelined",
        "unpipelined",
        "next faster",
        "beats it below, pipelined",
        "unpipelined",
    )
    notes = f"Links in Gb/s, on {source} KV, both ends a machine like this one with nothing else to do."
    return Table("Break-even bandwidth", header, rows, notes)


def speedups(found: Sequence[Figures], *, pipelined: bool) -> Table:
    """How much sooner KV is there than raw, by link."""
    rows = [
        [
            each.name,
            *(
                f"{seconds(None, gbit / 8, pipelined=pipelined) / seconds(each, gbit / 8, pipelined=pipelined):.2f}"
                for gbit in GBITS
            ),
        ]
        for each in found
    ]
    how = "pipelined" if pipelined else "unpipelined"
    header = ("codec", *(f"{gbit:g} Gb/s" for gbit in GBITS))
    return Table(f"Time of a raw transfer over time with the codec, {how}", header, rows, "By the measured rates.")
