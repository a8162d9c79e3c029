"""Writes what the newest smoke run on a GPU says into docs/models.md and docs/performance.md: `make docs-models`."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "gpu-smoke.json"
MODELS, PERFORMANCE = ROOT / "docs" / "models.md", ROOT / "docs" / "performance.md"


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


def summary(results: dict) -> str:
    """The whole run as a list of figures, failed cases by name."""
    cases = results["cases"]
    requests, crossed, differ, compared = (
        sum(case[key] for case in cases) for key in ("requests", "crossed", "differ", "compared_with_transformers")
    )
    failed = [case["case"] for case in cases if case["faults"]]
    ends = f"; failed: {', '.join(failed)}" if failed else ""
    run = f"{results['date']}, one {results['card']}, PyTorch {results['torch']}, commit {results['commit'][:8]}"
    return "\n".join(
        [
            f"Newest result, {run}:",
            "",
            f"- {len(cases) - len(failed)} of {len(cases)} cases pass{ends};",
            f"- {requests:,} requests; the KV of {crossed:,} came from a prefill worker;",
            f"- answers that differ from those of the same requests alone: {differ:,};",
            f"- greedy answers in float32 compared with transformers': {compared:,}.",
        ]
    )


def written(page: Path, mark: str, text: str) -> str:
    """The page with `text` between its marks, which are comments."""
    place = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", re.DOTALL)
    content, found = place.subn(lambda match: f"{match[1]}{text}\n{match[2]}", page.read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit(f"{page.name} has no place for the result; mark it with <!-- {mark} -->")
    return content


def pages(architectures: list[str], results: dict) -> dict[Path, str]:
    """Each page as it should be."""
    return {
        MODELS: written(MODELS, "models", table(architectures, results)),
        PERFORMANCE: written(PERFORMANCE, "smoke", summary(results)),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.smoke.models import ARCHITECTURES

    for page, content in pages(list(ARCHITECTURES), json.loads(RESULTS.read_text(encoding="utf-8"))).items():
        page.write_text(content, encoding="utf-8")
        sys.stdout.write(f"{page} is written\n")
