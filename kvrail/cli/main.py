"""The command `kvrail`: one module of this package for each of its commands."""

import sys
from pathlib import Path

from kvrail import __version__
from kvrail.cli import bench, calibrate, certs, keys, pack, quality, role, up
from kvrail.cli.flags import HelpFormatter, OneLineErrors
from kvrail.cli.remote import chat, status, trace
from kvrail.errors import ConfigError, KvrailError

USAGE_ERROR = 2


def build_parser() -> OneLineErrors:
    """The parser of all commands; each command's module adds its flags and the function that runs it."""
    parser = OneLineErrors(
        prog="kvrail",
        description="LLM serving with prefill and decode on separate workers.",
        epilog="kvrail COMMAND --help lists the flags of one command. kvrail FOLDER is kvrail serve FOLDER.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvrail {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for module in (up, role, chat, status, trace, bench, calibrate, quality, pack, certs, keys):
        module.add_commands(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run `kvrail` with `argv` (default: the process's arguments); returns the exit status."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    if argv and Path(argv[0]).is_dir() and not any(argv[0] in (action.choices or ()) for action in parser._actions):
        argv = ["serve", *argv]
    arguments = parser.parse(argv)
    if not hasattr(arguments, "run"):
        sys.stderr.write(parser.format_help())
        return USAGE_ERROR
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return USAGE_ERROR
    except KvrailError as error:
        sys.stderr.write(f"{arguments.prog}: {error}\n")
        return 1
    return status
