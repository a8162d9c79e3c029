"""`kvrail pack` and `kvrail unpack`: a model's weights in fewer bytes, and back."""

import argparse
import importlib
from functools import partial
from pathlib import Path
from typing import cast

from kvrail.cli.flags import Commands, add_command
from kvrail.cli.role import check_worker_installed
from kvrail.runtime.progress import lines_while

PACK = "store a model's weights losslessly in fewer bytes; workers load the packed folder as it is"
PACK_EPILOG = """MODEL is a folder with config.json and safetensors files; all its other files are copied. OUT must not
exist. A run that is stopped leaves OUT.partial and OUT.journal, and the same command goes on from there. With --base
only what differs from that model is stored; workers do not load such a folder, unpack it first.

examples:
  kvrail pack models/Qwen3-8B packed/Qwen3-8B
  kvrail decode --model packed/Qwen3-8B
  kvrail pack checkpoints/2000 packed/2000 --base checkpoints/1000 --verify"""
UNPACK = "restore the very files that a packed folder was made of"
UNPACK_EPILOG = """PACKED is a folder that kvrail pack made. OUT must not exist. A run that is stopped leaves
OUT.partial and OUT.journal, and the same command goes on from there.

examples:
  kvrail unpack packed/Qwen3-8B models/Qwen3-8B
  kvrail unpack packed/2000 checkpoints/2000 --base checkpoints/1000"""


def add_commands(commands: Commands) -> None:
    """Add `kvrail pack` and `kvrail unpack`."""
    for name, summary, epilog, source in (
        ("pack", PACK, PACK_EPILOG, "MODEL"),
        ("unpack", UNPACK, UNPACK_EPILOG, "PACKED"),
    ):
        with add_command(commands, name, summary, epilog, partial(run, name), f"{source} OUT") as parser:
            parser.add_argument("source", type=Path, metavar=source, help="folder to read")
            parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
            parser.add_argument(
                "--base",
                type=Path,
                metavar="DIR",
                help="folder of the model that is taken off (default none)",
            )
            parser.add_argument("--verify", action="store_true", help="read again what was written, and compare it")


def run(name: str, arguments: argparse.Namespace) -> int:
    """Pack or unpack; returns the exit status. What needs torch is imported here and not before."""
    check_worker_installed(name)
    with lines_while(lambda: "loading PyTorch"):
        service = importlib.import_module("kvrail.tools.pack.main")
    options = service.Options(arguments.source, arguments.out, arguments.base, arguments.verify)
    return cast(int, getattr(service, f"run_{name}")(options))
