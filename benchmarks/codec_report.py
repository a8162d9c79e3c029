"""What a benchmark of codecs leaves behind: tables as Markdown, figures as JSON, and a plot."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch

from benchmarks.codec_breakeven import seconds
from benchmarks.codec_tables import Table
from benchmarks.codec_trials import Figures

GIB = 1 << 30
AMD_FAMILIES = {"23": " (Zen, Zen 2)", "25": " (Zen 3, Zen 4)", "26": " (Zen 5)"}
"""Virtual machines hide the model, but not the family."""
RESULTS = Path(__file__).parent / "results"


def hardware(device: torch.device) -> str:
    """The machine in words."""
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name(device)}"
    words = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in words.split("\n\n")[0].splitlines() if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in fields.items()}
    name = cpu.get("model name", platform.processor() or platform.machine())
    memory = Path("/proc/meminfo").read_text().split()[1] if Path("/proc/meminfo").exists() else "0"
    family = AMD_FAMILIES.get(cpu.get("cpu family", ""), "") if "AMD" in name else ""
    return f"{torch.get_num_threads()} cores of an {name}{family}, {round(int(memory) * 1024 / GIB)} GiB"


def head(device: torch.device, module: str) -> dict[str, str]:
    """Date, machine, how busy it was when this began, command and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(device),
        "load": f"{os.getloadavg()[0]:.1f}",
        "command": f"python -m {module} {_arguments()}".strip(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def _arguments() -> str:
    """The command line's, without the folder for the results: it says nothing of them."""
    words = sys.argv[1:]
    while "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return shlex.join(words)


def markdown(facts: dict[str, str], title: str, gate: str, tables: Sequence[Table]) -> str:
    """All of it as one text; gate: what was checked before anything was timed."""
    lines = [
        f"# {title}, {facts['date']}",
        "",
        f"{facts['hardware']}, load average {facts['load']} at the start; torch {facts['torch']}:",
        f"`{facts['command']}`",
        "",
        gate,
        "Rates are bytes of uncompressed KV a second, 1 GB = 10^9 bytes, medians; ratios count all metadata.",
        "",
    ]
    for table in tables:
        lines += [f"## {table.title}", "", *_rows(table), ""]
        lines += [table.notes, ""] if table.notes else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _rows(table: Table) -> list[str]:
    used = [n for n, name in enumerate(table.header) if n == 0 or any(row[n] for row in table.rows)]
    body = [table.header, ["---"] * len(table.header), *table.rows]
    return ["| " + " | ".join(str(row[n]) for n in used) + " |" for row in body]


def write(folder: Path, name: str, facts: Mapping[str, object], text: str, tables: Sequence[Table]) -> None:
    """NAME.md, which is `text`, and NAME.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    (folder / f"{name}.json").write_text(
        json.dumps({**facts, "tables": [_record(table) for table in tables]}, indent=1) + "\n"
    )


def _record(table: Table) -> dict[str, object]:
    record = asdict(table)
    return record | {"figures": [asdict(each) | {"ratio": each.ratio} for each in table.figures]}


def plot(path: Path, facts: dict[str, str], codecs: Sequence[Figures], chunks: dict[str, Sequence[Figures]]) -> None:
    """Ratio and rate of each codec, what it gains on which link, and speed by size of a tile, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvrail"
    from matplotlib import pyplot

    figure, (rates, links, sizes) = pyplot.subplots(1, 3, figsize=(16, 4.6), layout="constrained")
    for each in codecs:
        rates.plot([each.ratio] * 2, [each.encode_rate, each.decode_rate], color="0.8", zorder=1)
        rates.scatter(each.ratio, each.encode_rate, marker="^", color="tab:blue")
        rates.scatter(each.ratio, each.decode_rate, marker="v", color="tab:orange")
        rates.annotate(
            each.name,
            (each.ratio, each.decode_rate),
            rotation=35,
            fontsize=8,
            xytext=(2, 6),
            textcoords="offset points",
        )
    rates.set(title="encode ▲ and decode ▼", xlabel="ratio", ylabel="GB/s of KV", yscale="log")
    rates.margins(0.25, 0.45)
    bandwidths = np.geomspace(0.01, 100, 200)
    for each in codecs:
        gains = [seconds(None, b, pipelined=True) / seconds(each, b, pipelined=True) for b in bandwidths]
        links.plot(bandwidths * 8, gains, label=each.name)
    links.axhline(1, color="0.6", linewidth=0.8)
    links.set(
        title="raw transfer over this, pipelined", xlabel="link, Gb/s", ylabel="times", xscale="log", ylim=(0, 1.6)
    )
    links.legend(fontsize=8)
    for name, found in chunks.items():
        x = [int(each.name) for each in found]
        for label, y in (("encode", [f.encode_rate for f in found]), ("decode", [f.decode_rate for f in found])):
            sizes.plot(x, y, marker="o", label=f"{name}, {label}")
    sizes.set(title="size of a tile", xlabel="values", ylabel="GB/s of KV", xscale="log")
    sizes.set_xscale("log", base=2)
    sizes.legend(fontsize=8)
    figure.suptitle(f"{facts['hardware']}, {facts['date']}")
    figure.savefig(path, metadata={"Date": None})
