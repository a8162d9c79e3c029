"""`kvrail trace`: one request on its way through router and workers, as a file for Perfetto and Chrome."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from kvrail.cli.flags import Commands, add_command, add_server, api_key
from kvrail.errors import ConfigError, WorkerUnavailableError
from kvrail.telemetry.moments import Moment, partition

SUMMARY = "draw one request's way through a running cluster"
EPILOG = """Open the file at https://ui.perfetto.dev or in chrome://tracing.

examples:
  kvrail trace < SECURITY.md                       writes trace.json; long enough for its KV to cross
  kvrail trace --out short.json "What is grep?"    a short prompt stays on the decode worker"""

Json = dict[str, Any]
ROUNDED_S = 2e-6
"""Times are whole microseconds, so adjacent spans may seem to overlap by this much."""
SPAN_FIELDS = ("process", "track", "name", "begin", "seconds")


def add_commands(commands: Commands) -> None:
    """Add `kvrail trace`."""
    with add_command(commands, "trace", SUMMARY, EPILOG, run, "[MESSAGE]") as parser:
        parser.add_argument("message", nargs="*", metavar="MESSAGE", help="ask this (default: standard input)")
        parser.add_argument(
            "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="file to write (default trace.json)"
        )
        parser.add_argument("--force", action="store_true", help="overwrite the file if it exists")
        add_server(parser)
        parser.add_argument("--codec", metavar="NAME", help="how the KV crosses (default: the server's)")
        parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="longest answer (default 64)")


def run(arguments: argparse.Namespace) -> int:
    """Ask once and write the trace; returns the exit status. Raises KvrailError where that fails."""
    from kvrail.cli.remote.client import ChatClient

    if arguments.out.exists() and not arguments.force:
        raise ConfigError(f"--out: {arguments.out} exists; add --force, or name another file")
    message = " ".join(arguments.message) or sys.stdin.read().strip()
    if not message:
        raise ConfigError("there is no message; give one, or pipe it to standard input")
    with closing(ChatClient(arguments.url, api_key(arguments))) as client:
        model = client.chosen(arguments.model)
        options: Json = {"trace": True} | ({"codec": arguments.codec} if arguments.codec else {})
        body = {"messages": [{"role": "user", "content": message}], "max_tokens": arguments.max_tokens}
        answer = client.complete({"model": model, **body, "kvrail": options})
    usage = answer.get("usage", {}).get("kvrail", {})
    if "trace" not in usage:
        raise WorkerUnavailableError(f"{arguments.url} sends no traces; is it a router of kvrail?")
    try:
        arguments.out.write_text(json.dumps(chrome_trace(usage)))
    except OSError as error:
        raise ConfigError(f"--out: {arguments.out} cannot be written: {error.strerror}") from None
    sys.stdout.write(summary(usage, arguments.out))
    return 0


def summary(usage: Json, path: Path) -> str:
    """Where the request's time went, a line for each part, and where the file is."""
    parts = usage["stage_seconds"]
    width = max(map(len, parts), default=0)
    lines = [f"{name:<{width}}  {1e3 * seconds:9.2f} ms" for name, seconds in parts.items()]
    return "\n".join([*lines, f"{path}: open it at https://ui.perfetto.dev", ""])


def chrome_trace(usage: Mapping[str, Any]) -> Json:
    """The usage's member `kvrail` of a traced request, in Chrome's trace event format.

    Each process has its tracks; what overlaps on a track is put into lanes, since a lane can only nest.
    """
    trace = usage["trace"]
    spans = [*_parts(trace["moments"]), *trace["spans"]]
    events: list[Json] = []
    pids: dict[str, int] = {}
    lanes: dict[tuple[str, str, int], int] = {}
    for span, lane in _in_lanes(spans):
        process, track = span["process"], span["track"]
        pid = pids.setdefault(process, len(pids) + 1)
        tid = lanes.setdefault((process, track, lane), len(lanes) + 1)
        begin, seconds = span["begin"], span["seconds"]
        sizes = {key: value for key, value in span.items() if key not in SPAN_FIELDS}
        events.append(
            {"ph": "X", "cat": track, "name": span["name"], "ts": 1e6 * begin, "dur": 1e6 * seconds, "pid": pid}
            | {"tid": tid, "args": sizes}
        )
    names = [_named("process_name", name, pid) for name, pid in pids.items()]
    for (process, track, lane), tid in lanes.items():
        names.append(_named("thread_name", track if lane == 0 else f"{track} {lane + 1}", pids[process], tid))
    others = {key: value for key, value in usage.items() if key != "trace"}
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": others}


def _parts(moments: Mapping[str, float]) -> Iterator[Json]:
    """The partition of the request's time, as a process of its own."""
    for name, begin, end in partition(moments.get):
        if end > begin:
            yield {"process": "request", "track": "parts", "name": name, "begin": begin, "seconds": end - begin}
    if (received := moments.get(Moment.RECEIVED.value)) is not None:
        last = max(moments.values())
        yield {"process": "request", "track": "whole", "name": "request", "begin": received, "seconds": last - received}


def _in_lanes(spans: Iterable[Json]) -> Iterator[tuple[Json, int]]:
    """Each span with the first lane of its track that is free when it begins."""
    ends: dict[tuple[str, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: float(span["begin"])):
        lanes = ends.setdefault((span["process"], span["track"]), [])
        begin, end = span["begin"], span["begin"] + span["seconds"]
        free = next((lane for lane, until in enumerate(lanes) if until <= begin + ROUNDED_S), len(lanes))
        lanes[free : free + 1] = [end]
        yield span, free


def _named(kind: str, name: str, pid: int, tid: int = 0) -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
