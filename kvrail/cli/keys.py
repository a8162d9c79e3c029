"""`kvrail keys`: add a key to the router's file of API keys, list the keys, revoke one."""

import argparse
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from itertools import pairwise
from pathlib import Path

from kvrail.cli.flags import Commands, add_command
from kvrail.errors import ConfigError
from kvrail.security.files import write_whole
from kvrail.security.keyfile import NAME, Key, hash_of, new_secret, parse

SUMMARY = "add an API key to the router's file of keys, list the keys, or revoke one"
EPILOG = """A new key is printed once and kept nowhere; the file keeps its SHA-256. A running router reads the file
again when it has changed: a revoked key is refused from the next request on.

examples:
  kvrail keys add alice --file keys.toml --requests-per-minute 60 --tokens-per-minute 100000 --expires 2027-01-31
  kvrail keys list --file keys.toml
  kvrail keys revoke alice --file keys.toml"""
ADD, LIST, REVOKE = "add", "list", "revoke"
TABLE = re.compile(rb"^[ \t]*\[\[[ \t]*keys[ \t]*\]\]", re.MULTILINE)
LIMITS = {
    "requests_per_minute": "requests in any 60 seconds",
    "tokens_per_minute": "tokens of prompts and outputs in any 60 seconds",
    "concurrent_requests": "requests at once",
}
_NEW = (*LIMITS, "models", "expires")


def add_commands(commands: Commands) -> None:
    """Add `kvrail keys`."""
    with add_command(commands, "keys", SUMMARY, EPILOG, run, "add|revoke NAME | list") as parser:
        parser.add_argument("action", choices=(ADD, LIST, REVOKE), metavar="add, list or revoke", help="what to do")
        parser.add_argument("name", nargs="?", metavar="NAME", help="whose key it is; in metrics and logs")
        parser.add_argument("--file", type=Path, required=True, metavar="FILE", help="add makes it where it is missing")
        new = parser.add_argument_group("a new key")
        for limit, meaning in LIMITS.items():
            new.add_argument(f"--{limit.replace('_', '-')}", metavar="N", help=f"most {meaning} (default no limit)")
        new.add_argument("--models", default="", metavar="A,B,…", help="names that it may ask for (default all)")
        new.add_argument("--expires", default="", metavar="DATE", help="last moment, as 2027-01-31 (default never)")


def run(arguments: argparse.Namespace) -> int:
    """Add, list or revoke; returns 0. Raises ConfigError where something is in the way; the file then is unchanged."""
    file: Path = arguments.file
    if (arguments.name is None) != (arguments.action == LIST):
        remedy = "drop NAME" if arguments.name else f"write kvrail keys {arguments.action} NAME --file {file}"
        raise ConfigError(f"keys {arguments.action} takes {'no NAME' if arguments.name else 'a NAME'}; {remedy}")
    if arguments.action != ADD and (given := [limit for limit in _NEW if getattr(arguments, limit)]):
        raise ConfigError(f"--{given[0].replace('_', '-')} is for a new key; drop it from keys {arguments.action}")
    try:
        if arguments.action == LIST:
            sys.stdout.write(_listed(parse(file.read_bytes(), f"--file {file}").values()))
            return 0
        with _alone(file.parent):
            before = file.read_bytes() if arguments.action != ADD or file.exists() else b""
            if arguments.action == ADD:
                _add(arguments, before)
            else:
                rest = without(before, arguments.name, f"--file {file}")
                _write(file, rest or b"# no keys\n")  # routers take an empty file for an unfinished one
                sys.stderr.write(f"{arguments.name} is revoked; a router that reads {file} refuses it from now on\n")
    except OSError as error:
        remedy = "name the file that the router reads" if arguments.action != ADD else "name a file that can be written"
        raise ConfigError(f"--file {file}: {error.strerror}; {remedy}") from None
    return 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """While no other `kvrail keys` changes a file of the folder. The file itself cannot be locked: it is replaced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _add(arguments: argparse.Namespace, before: bytes) -> None:
    """Put a new key's table at the file's end, and print the key."""
    if not re.fullmatch(NAME, arguments.name):
        raise ConfigError(f"NAME: {arguments.name!r} is none; write letters, digits and . _ @ -, at most 64")
    file, secret = arguments.file, new_secret()
    after = before + (b"\n" if before else b"") + _table(arguments, secret).encode()
    parse(before, f"--file {file}")
    parse(after, f"--file {file} with this key")
    _write(file, after)
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write(f"{arguments.name} is in {file}; the key above is kept nowhere else\n")


def without(content: bytes, name: str, where: str) -> bytes:
    """The file's content less the table of one key; comments and other tables stay as they are.

    Raises ConfigError where no key has that name, or where the table cannot be cut out of the text by itself.
    """
    keys = parse(content, where)
    kept = {digest: key for digest, key in keys.items() if key.name != name}
    if len(kept) == len(keys):
        names = ", ".join(key.name for key in keys.values()) or "none"
        raise ConfigError(f"NAME: no key of {where} is called {name!r}; its keys: {names}")
    starts = [match.start() for match in TABLE.finditer(content)] + [len(content)]
    for start, end in pairwise(starts):
        rest = content[:start] + content[end:]
        try:
            if parse(rest, where) == kept:
                return rest
        except ConfigError:  # a line inside a string looked like the head of a table
            continue
    raise ConfigError(f"{where}: the table of {name!r} is not written as [[keys]] of its own; delete it by hand")


def _listed(keys: Iterable[Key]) -> str:
    """A line for each key: its name, limits, models and last moment."""
    rows: list[tuple[str, ...]] = [("name", "requests/min", "tokens/min", "at once", "models", "expires")]
    for key in keys:
        limits = ["-" if limit is None else str(limit) for limit in (getattr(key, name) for name in LIMITS)]
        expired = " (expired)" if key.expired else ""
        until = f"{key.expires:%Y-%m-%d %H:%M} UTC{expired}" if key.expires else "never"
        rows.append((key.name, *limits, ",".join(key.models) or "all", until))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)


def _table(arguments: argparse.Namespace, secret: str) -> str:
    """The key's table in TOML. Raises ConfigError where a limit is no number or a date no date."""
    lines = ["[[keys]]", f'name = "{arguments.name}"', f'sha256 = "{hash_of(secret)}"']
    for limit in LIMITS:
        given = getattr(arguments, limit)
        if given is not None:
            if not given.isascii() or not given.isdecimal() or not int(given):
                raise ConfigError(f"--{limit.replace('_', '-')}: {given!r} is no limit; write a number of 1 or more")
            lines.append(f"{limit} = {int(given)}")
    if models := [part.strip() for part in arguments.models.split(",") if part.strip()]:
        lines.append(f"models = {json.dumps(models)}")
    if arguments.expires:
        lines.append(f"expires = {_moment(arguments.expires)}")
    return "\n".join(lines) + "\n"


def _moment(given: str) -> str:
    for kind in (date, datetime):
        try:
            return kind.fromisoformat(given).isoformat()
        except ValueError:
            continue
    raise ConfigError(f"--expires: {given!r} is no date; write one as 2027-01-31 or 2027-01-31T12:00:00Z")


def _write(file: Path, content: bytes) -> None:
    """Replace the file as a whole, with the permissions that it had; a new one is for its owner alone."""
    write_whole(file, content, file.stat().st_mode & 0o777 if file.exists() else 0o600)
