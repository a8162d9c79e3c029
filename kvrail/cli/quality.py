"""`kvrail quality`: what lossy codecs and pages cost a model on the user's own text."""

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import cast

from kvrail.cli.checks import check_codec, check_model, check_readable, check_writable, lossy_codecs
from kvrail.cli.flags import Commands, add_command, add_measured
from kvrail.cli.role import check_worker_installed
from kvrail.errors import ConfigError
from kvrail.runtime import logs
from kvrail.tools.quality.options import PAGE_FORMS, Options

logger = logging.getLogger("kvrail.quality")

SUMMARY = (
    "measure what codecs of KV and lossy pages cost a model: loss, agreement and KL on your text, beside bits a value"
)
EPILOG = """Each text is cut into contexts. The KV of a context goes through each codec; then the model reads the text's
next tokens over what the codec left, and over the exact KV. A form of pages closes all of a context's pages but the
first, and opens them again.

examples:
  kvrail quality --text models/kvrail-demo/heldout.txt --context-tokens 256 --next-tokens 64
  kvrail quality --text models/kvrail-demo/heldout.txt --context-tokens 256 --next-tokens 64 --kv-cache int8,int4,plain
  kvrail quality --model Qwen/Qwen3-8B --device cuda --codecs int8,int4,kvcomp --text chat.txt --text code.py
  kvrail quality --model Qwen/Qwen3-8B --device cuda --text chat.txt --json quality.json"""
DTYPES = ("bfloat16", "float16", "float32")


def add_commands(commands: Commands) -> None:
    """Add `kvrail quality`."""
    with add_command(commands, "quality", SUMMARY, EPILOG, run) as parser:
        what = parser.add_argument_group("what is measured")
        add_measured(what, DTYPES)
        what.add_argument("--codecs", default="", metavar="A,B", help="codecs, by name (default: all that are lossy)")
        what.add_argument(
            "--kv-cache",
            default="",
            metavar="A,B",
            help=f"forms of pages at rest ({' | '.join(PAGE_FORMS)}); without --codecs, these alone",
        )
        what.add_argument(
            "--contexts", default=35, type=int, metavar="N", help="at most N contexts, of all texts (default 35)"
        )
        what.add_argument(
            "--context-tokens", default=1024, type=int, metavar="N", help="tokens of a context (default 1024)"
        )
        what.add_argument(
            "--next-tokens", default=128, type=int, metavar="N", help="tokens after it that are judged (default 128)"
        )
        output = parser.add_argument_group("output")
        output.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, as JSON")
        output.add_argument("--force", action="store_true", help="overwrite FILE where it exists")


def run(arguments: argparse.Namespace) -> int:
    """Measure; returns the exit status. What needs torch is imported here and not before."""
    check_worker_installed("quality")
    check_model(arguments.model)
    forms = tuple(filter(None, arguments.kv_cache.split(",")))
    codecs = tuple(filter(None, arguments.codecs.split(","))) or (() if forms else lossy_codecs())
    for name in codecs:
        check_codec("--codecs", name)
    for name in forms:
        if name not in PAGE_FORMS:
            raise ConfigError(f"--kv-cache: no form of pages is called {name}; there are {', '.join(PAGE_FORMS)}")
    for text in arguments.text:
        check_readable("--text", text, "name a readable text file")
    if arguments.json is not None:
        check_writable("--json", arguments.json, force=arguments.force)
    options = Options(
        model=arguments.model,
        texts=tuple(arguments.text),
        codecs=codecs,
        forms=forms,
        contexts=arguments.contexts,
        context_tokens=arguments.context_tokens,
        next_tokens=arguments.next_tokens,
        dtype=arguments.kv_dtype,
        device=arguments.device,
        json=arguments.json,
    )
    options.check()
    with logs.shown_on(sys.stderr):
        logger.info("loading PyTorch and transformers")
        return cast(int, importlib.import_module("kvrail.tools.quality.main").run(options))
