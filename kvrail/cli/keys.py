"""`kvrail keys add`: a new API key for the router's file of keys."""

import argparse
import json
import os
import re
import sys
from datetime import date, datetime
from pathlib import Path

from kvrail.cli.flags import Commands, add_command
from kvrail.errors import ConfigError
from kvrail.security.keyfile import NAME, hash_of, new_secret, parse

SUMMARY = "make an API key and put its hash into the router's file of keys"
EPILOG = """The key is printed once and kept nowhere; the file keeps its SHA-256. A running router reads the file again
when it has changed. To take a key back, delete its table from the file.

example:
  kvrail keys add alice --file keys.toml --requests-per-minute 60 --tokens-per-minute 100000 --expires 2027-01-31"""
LIMITS = {
    "requests_per_minute": "requests in any 60 seconds",
    "tokens_per_minute": "tokens of prompts and outputs in any 60 seconds",
    "concurrent_requests": "requests at once",
}


def add_commands(commands: Commands) -> None:
    """Add `kvrail keys`."""
    with add_command(commands, "keys", SUMMARY, EPILOG, run, "add NAME") as parser:
        parser.add_argument("action", choices=("add",), metavar="add", help="what to do")
        parser.add_argument("name", metavar="NAME", help="whose key it is; in metrics and logs")
        parser.add_argument("--file", type=Path, required=True, metavar="FILE", help="made where it is missing")
        for limit, meaning in LIMITS.items():
            parser.add_argument(f"--{limit.replace('_', '-')}", metavar="N", help=f"most {meaning} (default no limit)")
        parser.add_argument("--models", default="", metavar="A,B,…", help="names that it may ask for (default all)")
        parser.add_argument("--expires", default="", metavar="DATE", help="last moment, as 2027-01-31 (default never)")


def run(arguments: argparse.Namespace) -> int:
    """Make the key, write the file, print the key; returns 0. Raises ConfigError where something is in the way."""
    file: Path = arguments.file
    if not re.fullmatch(NAME, arguments.name):
        raise ConfigError(f"NAME: {arguments.name!r} is none; write letters, digits and . _ @ -, at most 64")
    secret = new_secret()
    table = _table(arguments, secret)
    try:
        before = file.read_bytes() if file.exists() else b""
        after = before + (b"\n" if before else b"") + table.encode()
        parse(before, f"--file {file}")
        parse(after, f"--file {file} with this key")
        _write(file, after)
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}; name a file that can be written") from None
    sys.stdout.write(f"{secret}\n")
    sys.stderr.write(f"{arguments.name} is in {file}; the key above is kept nowhere else\n")
    return 0


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
    """Put the file in place as a whole; its permissions stay as they were."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)
    scratch.replace(file)
