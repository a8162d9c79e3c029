"""Only what tells people a time of day reads the wall clock: it jumps, and whatever waits by it waits wrongly."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
TELLING = {
    "kvrail/text/chat.py",
    "kvrail/security/keyfile.py",
    "kvrail/security/tls.py",
    "kvrail/cli/bench.py",
    "kvrail/cli/certs.py",
    "kvrail/services/router/answer/calls.py",
    "kvrail/services/router/answer/service.py",
    "kvrail/services/router/responses/service.py",
    "kvrail/services/router/responses/writer.py",
    "kvrail/telemetry/tracing.py",
}
"""A chat template's date; when an answer was created, and when it was complete; when a trace's span began; when
certificates and keys end; when a load was measured."""


def readings(source):
    """Lines that read the wall clock, or take a name for it from its module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in WALL:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and any((node.module, name.name) in WALL for name in node.names):
            yield node.lineno


def test_only_what_tells_the_time_of_day_reads_the_wall_clock():
    files = list((ROOT / "kvrail").rglob("*.py"))
    found = {str(path.relative_to(ROOT)) for path in files if list(readings(path.read_text()))}
    assert found == TELLING


def test_it_can_fail():
    assert list(readings("import time\nfrom time import time\ndeadline = time.time() + 1\n")) == [2, 3]
    assert not list(readings("from time import monotonic\nimport time\ntime.monotonic()\n"))
