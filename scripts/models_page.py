"""Writes the table of docs/models.md from the newest smoke run on a GPU: `make docs-models`."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu-smoke.json"
MARKS = re.compile("(<!-- models -->\n).*?(<!-- end of models -->)", re.DOTALL)


def table(architectures: list[str], results: dict) -> str:
    """A row for each architecture, with what the run says of its cases: its own, and its own in other settings."""
    cases = {case["case"]: case for case in results["cases"]}
    lines = ["| architecture | case | requests | KV crossed | answers that differ | result |", "|---" * 6 + "|"]
    for architecture in architectures:
        names = [name for name in cases if name.partition(",")[0] == architecture] or [architecture]
        for name in names:
            found = cases.get(name)
            if found is None:
                lines.append(f"| `{architecture}` | {name} | | | | not run yet |")
                continue
            result = "**fails**" if found["faults"] else "passes"
            if found["compared_with_transformers"]:
                result += f"; {found['compared_with_transformers']} answers are those of transformers"
            counts = " | ".join(str(found[key]) for key in ("requests", "crossed", "differ"))
            lines.append(f"| `{architecture}` | {name} | {counts} | {result} |")
    run = f"{results['card']}, PyTorch {results['torch']}, {results['date']}: {results['summary']}."
    return "\n".join([run, "", *lines])


def written(page: str, architectures: list[str], results: dict) -> str:
    """The page with its table as it should be."""
    text = table(architectures, results)
    page, found = MARKS.subn(lambda match: f"{match[1]}{text}\n{match[2]}", page)
    if found != 1:
        raise SystemExit(f"{PAGE.name} has no place for the table; mark it with <!-- models -->")
    return page


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.smoke.models import ARCHITECTURES

    before = PAGE.read_text(encoding="utf-8")
    after = written(before, list(ARCHITECTURES), json.loads(RESULTS.read_text(encoding="utf-8")))
    PAGE.write_text(after, encoding="utf-8")
    sys.stdout.write(f"{PAGE} is written\n")
