"""Lines of shipped code in each room, its budget, and the difference to another commit: `make lines REV=main`."""

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
CODE = {".css", ".cu", ".cuh", ".html", ".js", ".py"}
GENERATED = "kvrail/wire/v1/"
BUDGETS = "tests/house/budgets.toml"


def room_of(path: str) -> str | None:
    """The folder of the second level that a file belongs to; None where it is no shipped code of ours."""
    parts = PurePosixPath(path).parts
    if parts[0] != "kvrail" or PurePosixPath(path).suffix not in CODE or path.startswith(GENERATED):
        return None
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def git(root: Path, *arguments: str) -> str:
    """What a command of git prints; ends the script with git's own message where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip())
    return done.stdout


def lines(root: Path, revision: str | None = None) -> Counter[str]:
    """Lines by room: of the working tree, or of a commit."""
    empty = git(root, "hash-object", "-t", "tree", "/dev/null").strip()
    ends = [empty, revision] if revision else [empty]
    git(root, "rev-parse", "--verify", "--quiet", f"{revision or 'HEAD'}^{{commit}}")
    found: Counter[str] = Counter()
    for line in git(root, "diff", "--numstat", "--no-renames", *ends, "--", "kvrail").splitlines():
        added, _, path = line.split("\t")
        room = room_of(path)
        if room and added.isdigit():
            found[room] += int(added)
    return found


def budgets(root: Path) -> dict[str, int]:
    """The most lines that each room may have."""
    return dict(tomllib.loads((root / BUDGETS).read_text(encoding="utf-8")))


def over_budget(found: Mapping[str, int], allowed: Mapping[str, int]) -> list[str]:
    """What breaks the budgets, in words: a room with too many lines, one without a budget, a budget without a room."""
    problems = [
        f"{room} has {count:,} lines, its budget is {allowed[room]:,}"
        for room, count in found.items()
        if count > allowed.get(room, count)
    ]
    problems += [f"{room} has no budget" for room in found if room not in allowed]
    return problems + [f"{room} has a budget and no lines" for room in allowed if room not in found]


def table(now: Counter[str], before: Counter[str] | None, allowed: Mapping[str, int]) -> list[str]:
    """Rows to print: room, lines, budget, difference to `before`; the total last."""
    rows = []
    for room in [*sorted(set(now) | set(before or ())), "total"]:
        whole = room == "total"
        count, budget = (now.total(), sum(allowed.values())) if whole else (now[room], allowed.get(room, 0))
        change = "" if before is None else f"{count - (before.total() if whole else before[room]):>+8,}"
        rows.append(f"{room:<20}{count:>8,}{budget:>8,}{change}")
    return rows


if __name__ == "__main__":
    revision = sys.argv[1] if len(sys.argv) > 1 else None
    before = lines(ROOT, revision) if revision else None
    sys.stdout.write("\n".join(table(lines(ROOT), before, budgets(ROOT))) + "\n")
