"""Lines of shipped code in each room, and how many more or fewer than at another commit: `make lines REV=main`."""

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
CODE = {".css", ".cu", ".cuh", ".html", ".js", ".py"}
GENERATED = "kvrail/wire/v1/"


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


def table(now: Counter[str], before: Counter[str] | None) -> list[str]:
    """Rows to print, the total last."""
    rooms = [*sorted(set(now) | set(before or ())), "total"]
    now["total"] = now.total()
    if before is None:
        return [f"{room:<20}{now[room]:>8,}" for room in rooms]
    before["total"] = before.total()
    return [f"{room:<20}{now[room]:>8,}{now[room] - before[room]:>+8,}" for room in rooms]


if __name__ == "__main__":
    revision = sys.argv[1] if len(sys.argv) > 1 else None
    sys.stdout.write("\n".join(table(lines(ROOT), lines(ROOT, revision) if revision else None)) + "\n")
