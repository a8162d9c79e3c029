"""`kvrail bench`: load on a running server, and what its clients saw."""

import argparse
import json
import sys
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from kvrail.cli.flags import Commands, add_command, add_server, api_key
from kvrail.errors import ConfigError
from kvrail.tools.bench.client import Client
from kvrail.tools.bench.load import SAMPLING, Load, Range, load_of_trace
from kvrail.tools.bench.report import LIMITED, figures, table
from kvrail.tools.bench.run import measure
from kvrail.tools.bench.trace import Trace

SUMMARY = "measure a running server under load"
EPILOG = """Any server with OpenAI's /v1/completions that takes token ids and ignore_eos (kvrail, vLLM, SGLang).
The prompts of a seed are the same in every run: take another --seed where the server keeps prefixes of the last run.
Ctrl-C ends the load and reports what was measured until then. The exit status is 1 if any request failed.

examples:
  kvrail bench --streams 32 --requests 192
  kvrail bench --rate 16 --requests 240 --prompt-tokens 512:1536 --output-tokens 64:192 --goodput ttft:300 tpot:15
  kvrail bench --rate 16 --prefixes 8 --prefix-tokens 3072 --prompt-tokens 256 --json run.json
  kvrail bench --trace conversation_trace.jsonl --speed 0.5 --longest 32768 --goodput ttft:2000 tpot:25"""
INTERRUPTED = 130
SMALL_VOCAB = 1000
"""Every vocabulary has this many ids; OpenAI's API does not expose a model's own number."""
PROMPT, OUTPUT = Range(1024, 1024), Range(128, 128)


def add_commands(commands: Commands) -> None:
    """Add `kvrail bench`."""
    with add_command(commands, "bench", SUMMARY, EPILOG, run) as parser:
        add_server(parser.add_argument_group("server"), "server")
        arrivals = parser.add_argument_group("arrivals")
        kind = arrivals.add_mutually_exclusive_group()
        kind.add_argument("--streams", type=count, metavar="N", help="requests that are open at any time (default 8)")
        kind.add_argument("--rate", type=rate, metavar="X", help="requests a second, as a Poisson process")
        add_trace(kind, arrivals)
        arrivals.add_argument("--speed", type=rate, metavar="X", help="with --trace: X times as fast (default 1)")
        arrivals.add_argument(
            "--requests",
            type=count,
            metavar="N",
            help="how many to send (default 100), with --trace: the first N of it (default all)",
        )
        add_load(parser)
        parser.add_argument(
            "--sampling",
            choices=SAMPLING,
            default="sampled",
            help="sampled: temperature 1; filtered: 0.6 with top_k 20, top_p 0.95; greedy: 0 (default %(default)s)",
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")


def add_trace(kind: argparse._ActionsContainer, group: argparse._ActionsContainer) -> None:
    """Add the flags of a trace; kind: the group that takes one flag at a time."""
    kind.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths, in our form or in Mooncake's")
    group.add_argument(
        "--longest",
        type=count,
        metavar="N",
        help="with --trace: leave out requests of more than N tokens, prompt and output together (default none)",
    )


def add_load(parser: argparse.ArgumentParser, vocab: int = SMALL_VOCAB) -> None:
    """Add the flags of prompts, outputs and limits."""
    load = parser.add_argument_group("load")
    for name, default, of in (("prompt", PROMPT, "prompt, after its prefix"), ("output", OUTPUT, "output")):
        load.add_argument(
            f"--{name}-tokens",
            type=tokens,
            metavar="N[:M]",
            help=f"tokens of each {of}; N:M draws uniformly (default {default.least})",
        )
    load.add_argument("--prefixes", type=count, default=0, metavar="N", help="prefixes that prompts share (default 0)")
    load.add_argument("--prefix-tokens", type=count, default=0, metavar="N", help="tokens of each prefix (default 0)")
    load.add_argument("--vocab", type=count, default=vocab, metavar="N", help=f"ids are below this (default {vocab})")
    load.add_argument("--seed", type=seed, default=0, metavar="N", help="another one is another load (default 0)")
    load.add_argument("--timeout", type=rate, default=600.0, metavar="X", help="seconds of a request (default 600)")
    load.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"count requests/s within these limits: {' '.join(f'{name}:MS' for name in LIMITED)} (default none)",
    )


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write a whole number, at least {least}")
    return int(text)


count, seed = partial(_whole, least=1), partial(_whole, least=0)
"""Numbers from 1 on, and from 0 on."""


def rate(text: str) -> float:
    """A number above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write a number above 0, for example 16")
    return found


def tokens(text: str) -> Range:
    """A length or a range of lengths."""
    least, colon, most = text.partition(":")
    bounds = (least, most if colon else least)
    if not all(bound.isdecimal() and int(bound) for bound in bounds) or int(bounds[0]) > int(bounds[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write 1024, or a range such as 512:1536")
    return Range(int(bounds[0]), int(bounds[1]))


def limit(text: str) -> tuple[str, float]:
    """A limit of goodput: what it holds for, and milliseconds."""
    name, _, value = text.partition(":")
    if name in LIMITED:
        with suppress(argparse.ArgumentTypeError):
            return name, rate(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; write {', '.join(LIMITED)} with :MS, as in ttft:300")


def load_of(arguments: argparse.Namespace, **changes: object) -> Load:
    """The load that the flags describe; changes: other values of its fields. Raises ConfigError."""
    same = {"vocab": arguments.vocab, "seed": arguments.seed}
    if arguments.trace:
        return load_of_trace(_trace_of(arguments), **(same | changes))
    for name in ("speed", "longest"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} needs --trace too, for example --trace conversation_trace.jsonl")
    if bool(arguments.prefixes) != bool(arguments.prefix_tokens):
        given, missing = ("--prefixes", "--prefix-tokens")[:: 1 if arguments.prefixes else -1]
        raise ConfigError(f"{given} needs {missing} too, for example --prefixes 8 --prefix-tokens 3072")
    fields = {
        "prompt": arguments.prompt_tokens or PROMPT,
        "output": arguments.output_tokens or OUTPUT,
        "prefixes": arguments.prefixes,
        "prefix_tokens": arguments.prefix_tokens,
    }
    return Load(**(same | fields | changes))


def _trace_of(arguments: argparse.Namespace) -> Trace:
    for name in ("prompt_tokens", "output_tokens", "prefixes", "prefix_tokens"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name.replace('_', '-')} goes without --trace, which says how long requests are")
    return Trace.read(arguments.trace, first=arguments.requests, longest=arguments.longest)


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; returns the exit status."""
    from kvrail.cli.remote.client import ChatClient

    if arguments.trace:
        arrivals = {"speed": arguments.speed or 1.0}
    else:
        streams = 0 if arguments.rate else arguments.streams or 8
        arrivals = {"requests": arguments.requests or 100, "streams": streams, "rate": arguments.rate or 0.0}
    load = load_of(arguments, **arrivals, sampling=arguments.sampling)
    if arguments.json:
        _write(arguments.json, "", "a")  # a file that cannot be written fails now, not after the load
    key = api_key(arguments)
    with closing(ChatClient(arguments.url, key)) as chat:
        model = chat.chosen(arguments.model)
    sys.stderr.write(f"{arguments.url}, {model}: {load}\n")
    try:
        measured = measure(Client(arguments.url, key, timeout_s=arguments.timeout), load, model)
    except KeyboardInterrupt:
        return INTERRUPTED
    limits = dict(arguments.goodput)
    found = figures(measured, limits)
    sys.stdout.write(table(found, limits))
    if arguments.json:
        head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "url": arguments.url, "model": model}
        report = {**head, "load": load.settings(), "goodput": limits, **found}
        _write(arguments.json, json.dumps(report, indent=1) + "\n")
    if measured.unfinished:
        return INTERRUPTED
    return 1 if measured.failures else 0


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}") from None
