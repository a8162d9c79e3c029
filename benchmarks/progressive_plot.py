"""When which token is there, by codec, as a plot of benchmarks/progressive.py's results: Lynx's figure 9 with our data.

    python -m benchmarks.progressive_plot benchmarks/results/progressive-DATE-MACHINE.json

One panel for each length and rate: seconds until a client has its k-th token, verified (lines) or drafted (dots).
Writes an SVG file beside the result.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FIRST = "first token"


def points(header: Sequence[str], row: Sequence[str], kind: str) -> dict[int, float]:
    """Seconds by number of tokens, from a row of a table of times; kind: verified or shown."""
    named = {name: cell for name, cell in zip(header, row, strict=True) if cell}
    found = {int(name.split()[0]): float(named[name]) for name in named if name.endswith(f" {kind}")}
    return {1: float(named[FIRST]), **found} if found else {}


def panels(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables of times among a result's."""
    return [table for table in found["tables"] if FIRST in table["header"]]


def plot(path: Path, found: Mapping[str, Any]) -> None:
    """Draw a result into the SVG file `path`. Raises SystemExit where it has no times."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvrail"
    from matplotlib import pyplot

    tables = panels(found)
    if not tables:
        raise SystemExit(f"{path.stem} has no table of times; name the JSON file of a run with --rates")
    size = (1 + 4.2 * len(tables), 4.2)
    figure, axes = pyplot.subplots(1, len(tables), figsize=size, layout="constrained", squeeze=False)
    for axis, table in zip(axes[0], tables, strict=True):
        for row in table["rows"]:
            verified, shown = (points(table["header"], row, kind) for kind in ("verified", "shown"))
            (line,) = axis.plot(list(verified), list(verified.values()), marker="|", label=row[0])
            axis.scatter(list(shown), list(shown.values()), color=line.get_color(), s=14)
        axis.set(title=table["title"], xlabel="k-th token", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"{found['hardware']}, {found['date']}\nlines: verified, dots: drafts shown", fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Plot the result that the command line names; returns the exit status."""
    summary = __doc__.split("\n", 1)[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progressive_plot", description=summary)
    parser.add_argument("result", type=Path, help="JSON file of a run with --rates")
    path: Path = parser.parse_args(argv).result
    plot(path.with_suffix(".svg"), json.loads(path.read_text()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
