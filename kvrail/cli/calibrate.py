"""`kvrail calibrate`: a SplitZip codebook from a model and some text."""

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import cast

from kvrail.cli.checks import check_model, check_readable, check_writable
from kvrail.cli.flags import Commands, add_command, add_measured
from kvrail.cli.role import check_worker_installed
from kvrail.runtime import logs
from kvrail.tools.calibrate.options import Options

logger = logging.getLogger("kvrail.calibrate")

SUMMARY = "measure a model's KV cache and write the codebook that the codec splitzip codes it with"
EPILOG = """A window is a run of 16 exponents (8 for float8_e4m3fn) that have a code; a value outside takes two or
three bytes more. The text should be like what will be served. Prefill and decode workers must be given the same file.

examples:
  kvrail calibrate --text prompts.txt --out demo.json
  kvrail calibrate --model Qwen/Qwen3-8B --device cuda --text chat.txt --text code.py --out qwen3-8b.json
  kvrail calibrate --model Qwen/Qwen3-8B --device cuda --text a.txt --kv-dtype float8_e5m2 --out qwen3-8b-e5m2.json"""
DTYPES = ("bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")


def add_commands(commands: Commands) -> None:
    """Add `kvrail calibrate`."""
    with add_command(commands, "calibrate", SUMMARY, EPILOG, run) as parser:
        what = parser.add_argument_group("what is measured")
        add_measured(what, DTYPES)
        what.add_argument(
            "--tokens",
            default=32768,
            type=int,
            metavar="N",
            help="measure at most N tokens, an equal share of each text (default 32768)",
        )
        codebook = parser.add_argument_group("codebook")
        codebook.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to write it, as JSON")
        codebook.add_argument("--force", action="store_true", help="overwrite FILE where it exists")
        windows = codebook.add_mutually_exclusive_group()
        windows.add_argument(
            "--per-layer", action="store_false", dest="shared", default=False, help="a window for each layer (default)"
        )
        windows.add_argument("--shared", action="store_true", help="one window for all layers")


def run(arguments: argparse.Namespace) -> int:
    """Calibrate; returns the exit status. What needs torch is imported here and not before."""
    check_worker_installed("calibrate")
    check_model(arguments.model)
    for text in arguments.text:
        check_readable("--text", text, "name a readable text file")
    check_writable("--out", arguments.out, force=arguments.force)
    options = Options(
        model=arguments.model,
        texts=tuple(arguments.text),
        out=arguments.out,
        tokens=arguments.tokens,
        dtype=arguments.kv_dtype,
        device=arguments.device,
        shared=arguments.shared,
    )
    options.check()
    with logs.shown_on(sys.stderr):
        logger.info("loading PyTorch and transformers")
        return cast(int, importlib.import_module("kvrail.tools.calibrate.main").run(options))
