"""`kvrail status`: the router's /health as a table, once or live."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, TextIO

from kvrail.cli.flags import Commands, add_command, add_server, api_key
from kvrail.errors import ConfigError

SUMMARY = "show the state of a running cluster and of each worker"
EPILOG = """Exit status: 0 where requests are served, 1 where they are not.

examples:
  kvrail status
  kvrail status --url http://gpu-host:8000 --watch 5
  kvrail status --json | jq .decode_workers"""
COUNTED = ("running", "waiting", "pages used", "cached", "free")
COLUMNS = ("role", "worker", "state", *COUNTED, "KV pages", "batch-invariant", "detail")
GROUPS = {"decode": "decode_workers", "prefill": "prefill_workers", "both": "workers"}
"""Where /health has the workers of each role."""
ALWAYS = frozenset(COLUMNS[:3])
NUMBERS = frozenset(COUNTED)
SERVED = ("ok", "degraded")
INTERRUPTED = 130
CLEAR = "\x1b[H\x1b[J"

Json = dict[str, Any]


def add_commands(commands: Commands) -> None:
    """Add `kvrail status`."""
    with add_command(commands, "status", SUMMARY, EPILOG, run) as parser:
        add_server(parser, "router, or of its admin port", model=False)
        parser.add_argument(
            "--watch", nargs="?", const="2", metavar="SECONDS", help="show it again and again (default every 2)"
        )
        parser.add_argument("--json", action="store_true", help="print the body of /health as it is")


def run(arguments: argparse.Namespace) -> int:
    """Print the state; returns 0 where requests are served, else 1. Raises KvrailError where there is no router."""
    from kvrail.cli.remote.client import ChatClient

    pause_s = _seconds(arguments.watch) if arguments.watch is not None else None
    with closing(ChatClient(arguments.url, api_key(arguments))) as client:
        try:
            while True:
                health = client.health()
                _show(health, sys.stdout, as_json=arguments.json, live=pause_s is not None)
                if pause_s is None:
                    return 0 if health["status"] in SERVED else 1
                time.sleep(pause_s)
        except KeyboardInterrupt:
            return INTERRUPTED


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise ConfigError(f"--watch: {given!r} is no number of seconds from 0.1 to 3600; write for example --watch 5")
    return seconds


def _show(health: Json, out: TextIO, *, as_json: bool, live: bool) -> None:
    if live and out.isatty() and not as_json:
        out.write(CLEAR)
    out.write(json.dumps(health) + "\n" if as_json else table(health))
    out.flush()


def table(health: Json) -> str:
    """The router's line, a line for each worker, and a line for each DNS name that does not resolve.

    Where the router shows strangers only the status, that one line says how to see more.
    """
    if "decode_workers" not in health:
        return f"{health['status']}; for the workers, name the router's admin port with --url or give an --api-key\n"
    requests = health["active_requests"]
    head = f"{health['status']}: {health['model']}, {requests} request{'' if requests == 1 else 's'} active"
    rows = [COLUMNS, *(row for role in GROUPS for row in _workers(role, health))]
    used = [column for column, name in enumerate(COLUMNS) if any(row[column] for row in rows[1:]) or name in ALWAYS]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = ["  ".join(_cell(row[column], column, widths[column]) for column in used).rstrip() for row in rows]
    names = [f"{name}: {entry['detail']}" for name, entry in health["dns"].items() if "detail" in entry]
    return "\n".join([head, "", *lines, *names, ""])


def _cell(text: str, column: int, width: int) -> str:
    return text.rjust(width) if COLUMNS[column] in NUMBERS else text.ljust(width)


def _workers(role: str, health: Json) -> Iterator[tuple[str, ...]]:
    """A row of text for each worker of a role; empty cells where the worker has not answered yet."""
    for target, entry in health[GROUPS[role]].items():
        pages = [""] * 3
        if total := entry.get("pages_total"):
            free, cached = entry["pages_free"], entry["pages_cached"]
            pages = [f"{count} ({count / total:.0%})" for count in (total - free - cached, cached, free)]
        invariant = {True: "yes", False: "no", None: ""}[entry.get("invariant")]
        counts = [str(entry.get(field, "")) for field in ("running", "waiting")]
        form, detail = entry.get("kv_cache", ""), entry.get("detail", "")
        yield (role, target, entry["state"], *counts, *pages, form, invariant, detail)
