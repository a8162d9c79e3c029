"""What a benchmark of codecs leaves behind: tables as Markdown, figures as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.codec_tables import Table
from benchmarks.facts import paragraph


def markdown(facts: dict[str, str], title: str, gate: str, tables: Sequence[Table]) -> str:
    """All of it as one text; gate: what was checked before anything was timed."""
    lines = [
        f"# {title}, {facts['date']}",
        "",
        paragraph(facts),
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
