"""Words that this project does not use, and why: `make words`.

The first list holds patterns of English that a reader has to read twice. The second holds names for which the field has
other words; it applies to tests, too. docs/decisions/ and benchmarks/results/ are history and left out.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".css", ".cu", ".cuh", ".html", ".js", ".json", ".md", ".proto", ".py", ".sh", ".toml", ".yaml", ".yml"}
LEFT_OUT = re.compile(
    r"^(scripts/words\.py|models/|examples/.*lock|docs/decisions/|docs/archive/|benchmarks/(results|archive)/|kvrail/wire/v1/)"
)

PLAIN_ENGLISH = {
    r"\bnobody\b": "say what does not happen: 'no caller reads it', 'unused'",
    r"\bwhoever\b": "name the subject: 'the caller', 'the process that'",
    r"\banew\b": "again; 'reloads', 'restarts'",
    r"(?<![A-Za-z])([Tt]ells|[Tt]old|[Hh]ears(?! of\b)|[Hh]eard)(?![A-Za-z])": "data is sent, announced, received",
    r"\b[Ll]ikewise\b": "'also', or say it again",
    r"\bof which\b": "two sentences, or 'whose'",
    r"\b[Ss]o (many|much|long)\b(?! (that|as)\b)": "'this many', or the number's name",
    r"(^|\. |\"\"\"|# )(Of|Of what) (what|an?|the|these|those|all|each|its|it)\b": "no sentence: no verb",
    r"(^|\. |\"\"\"|# )The same (as|for|of|in|with)\b": "no sentence: no verb",
    r"\btime and again\b": "repeatedly",
    r"\bin (any|the|whatever|its) company\b": "batch-invariant",
}
NAMES = {
    r"[Cc]arriers?(?![a-z])": "Transport",
    r"(?<![A-Za-z])([Oo]utlet|[Ii]nlet)|([a-z_]|\b)(Outlet|Inlet)": "PayloadSender, PayloadReceiver",
    r"[Tt]runk(?!\w*at)": "the event stream",
    r"(?<![A-Za-z])[Ll]edger|Ledger": "KV events",
    r"RequestBook": "RequestTracker",
    r"(?<![A-Za-z])(?<!in[-_ ])[Ff]lights?(?![A-Za-z])|(?<!In)Flight": "in-flight step",
    r"(?<![A-Za-z])(story|stories)(?![A-Za-z])|Story": "handler; what happens to a request",
    r"(?<![A-Za-z])[Pp]ace(?![A-Za-z])": "step cost, rate",
    r"[Qq]uarantine|(?<![A-Za-z])[Bb]ell(?![A-Za-z])|Bell": "retired buffers; Notifier",
}


def hits(root: Path) -> list[str]:
    """Each line of a tracked file that holds a word of the lists, as `path:line: 'word': what to write`."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    found = []
    for path in sorted(filter(None, tracked.split("\0"))):
        if (Path(path).suffix not in SUFFIXES and path != "Makefile") or LEFT_OUT.match(path):
            continue
        words = NAMES if path.startswith("tests/") else PLAIN_ENGLISH | NAMES
        any_of_them = re.compile("|".join(f"(?:{pattern})" for pattern in words))
        for number, line in enumerate((root / path).read_text(errors="replace").splitlines(), 1):
            if not any_of_them.search(line.strip()):
                continue
            for pattern, better in words.items():
                if match := re.search(pattern, line.strip()):
                    found.append(f"{path}:{number}: {match[0]!r}: {better}")
    return found


def main(prefixes: list[str]) -> int:
    """Print the hits below the given paths, all of them without one; 1 where there are any."""
    found = [hit for hit in hits(ROOT) if not prefixes or hit.startswith(tuple(prefixes))]
    sys.stdout.writelines(f"{hit}\n" for hit in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
