"""Progressive delivery over a slow link, as a client sees it: when the k-th token is there, drafted and verified.

    sudo python -m benchmarks.progressive [--rates 200mbit,1gbit] [--tokens 4096] [--rounds 9] [--cold]

The cluster of benchmarks/link.py: a prefill worker in one network namespace, a decode worker and the router in another,
a link of so many bits a second between them. The demo model reads text that it has not seen; every round is another
prompt, the codecs take turns, and the figures are medians over prompts. The prefill worker has a prompt's KV already,
so that the transfer is what a client waits for; with --cold it computes the prompt. Every request asks for drafts, and
counts what it sees of them (docs/provisional-streaming.md). Correctness first: with every exact codec the client must
get the same text. Where namespaces are not permitted, it says so and ends.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import codec_report, progressive_drafts
from benchmarks.anchor_drafts import DRAFTS
from benchmarks.codec_tables import Table
from benchmarks.link import DECODE_HOST, PREFILL_HOST, UNLIMITED, Cluster, limit, linked
from benchmarks.progressive_client import Trace, ask
from benchmarks.progressive_tables import Drafted, ratio_table, times_table
from codec import registry

CODECS = "raw,splitzip,splitzip-channel,splitzip-progressive,lynx,lynx-exact,auto"
OUTPUT_TOKENS = 80
"""More than the most drafts, and than the last token whose time is told."""
FEWEST_TOKENS = 2
"""KV does not cross for the first one."""
GATE = (
    "KV from a prefill worker in one network namespace to a decode worker in another; times in seconds, from the\n"
    "request to the client's k-th token. With every exact codec every answer was the same text."
)
TRIALS = 4
COMPILE_SECONDS = "300"
"""A codec's kernels are compiled when it is first asked for."""


class Bench:
    """A cluster, the namespaces around it, and what is asked of it."""

    def __init__(self, cluster: Cluster, spaces: Sequence[str], codecs: Sequence[str]) -> None:
        self._cluster = cluster
        self._spaces = spaces
        self._codecs = codecs

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Every prompt once, and every codec once, with nothing in the way."""
        limit(self._spaces, UNLIMITED)
        for prompt in prompts:
            self._ask(prompt, self._codecs[0], FEWEST_TOKENS)
        for codec in self._codecs:
            self._ask(prompts[0], codec)

    def times(self, rate: str, prompts: Sequence[Sequence[int]]) -> dict[str, list[Trace]]:
        """Answers to `prompts` by codec, in turn. Raises SystemExit where an exact codec gives another text."""
        limit(self._spaces, rate)
        found: dict[str, list[Trace]] = {codec: [] for codec in self._codecs}
        for prompt in prompts:
            for codec in self._codecs:
                trace = self._ask(prompt, codec)
                first = found[self._codecs[0]][-1] if codec != self._codecs[0] else trace
                if not trace.usage["lossy"] and trace.text != first.text:
                    raise SystemExit(f"{codec} gave {trace.text!r}; {self._codecs[0]} gave {first.text!r}")
                found[codec].append(trace)
        return found

    def drafts(self, rate: str, prompts: Sequence[Sequence[int]], codec: str) -> Drafted:
        """Drafts accepted of each prompt. Raises SystemExit where the link was too fast to make them all."""
        limit(self._spaces, rate)
        accepted, coded, raw = [], 0, 0
        for prompt in prompts:
            usage = self._fully_drafted(rate, prompt, codec)
            accepted.append(usage["drafts_accepted"])
            coded, raw = coded + usage["kv_bytes"], raw + usage["kv_raw_bytes"]
        return Drafted(accepted, 16 * coded / raw)

    def _fully_drafted(self, rate: str, prompt: Sequence[int], codec: str) -> dict[str, Any]:
        """Usage of an answer for which all drafts were made; a machine that others use too may need a few trials."""
        for _ in range(TRIALS):
            usage = self._ask(prompt, codec, DRAFTS + FEWEST_TOKENS).usage
            if usage["drafts_proposed"] == DRAFTS:
                return usage
        made = usage["drafts_proposed"]
        raise SystemExit(f"{codec}: {made} of {DRAFTS} drafts were made; take a slower --drafts-rate than {rate}")

    def _ask(self, prompt: Sequence[int], codec: str, tokens: int = OUTPUT_TOKENS) -> Trace:
        return ask(self._cluster.url, self._cluster.model, prompt, tokens, codec, provisional=True)


def measure_drafts(bench: Bench, options: argparse.Namespace) -> Table:
    """The table of accepted drafts, over the codecs of several stages."""
    lengths = [int(length) for length in options.drafts_tokens.split(",")]
    prompts = progressive_drafts.contexts(lengths)
    codecs = [name for name in options.codecs.split(",") if name != "auto" and registry.get(name).num_stages > 1]
    bench.warm_up(prompts)
    found = {codec: bench.drafts(options.drafts_rate, prompts, codec) for codec in codecs}
    print("drafts done", flush=True)
    held = progressive_drafts.sizes(prompts, codecs)
    accepted = {codec: each.accepted for codec, each in found.items()}
    bits = {codec: each.bits for codec, each in found.items()}
    return progressive_drafts.table(lengths, options.drafts_rate, accepted, bits, held)


def run_inside(options: argparse.Namespace) -> None:
    """In the decode worker's namespace: start the cluster, measure, write."""
    facts = codec_report.head(torch.device("cpu"), "benchmarks.progressive")
    facts["command"] = facts["command"].split(" --namespaces")[0]
    codecs, spaces = options.codecs.split(","), options.namespaces.split(",")
    cold = ["--no-prefix-cache"] if options.cold else []
    flags = ["--allow-lossy", "--transfer-timeout-s", COMPILE_SECONDS]
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        ports = range(options.port, options.port + 4)
        hosts = PREFILL_HOST, DECODE_HOST
        cluster = Cluster(Path(folder), *hosts, spaces[0], ports, prefill_flags=cold, decode_flags=flags)
        bench = Bench(cluster, spaces, codecs)
        try:
            for length in map(int, options.tokens.split(",")) if options.rates else ():
                prompts = progressive_drafts.contexts([length])[: options.rounds]
                bench.warm_up(prompts)
                for rate in options.rates.split(","):
                    answers = bench.times(rate, prompts)
                    print(f"{length} tokens at {rate} done", flush=True)
                    tables.append(times_table(length, rate, answers))
                    tables.append(ratio_table(length, rate, answers))
            if options.drafts_tokens:
                tables.append(measure_drafts(bench, options))
        finally:
            cluster.stop()
    title = f"Progressive delivery, prefix cache of the prefill worker {'cold' if options.cold else 'warm'}"
    text = codec_report.markdown(facts, title, GATE, tables)
    kind = "-cold" if options.cold else "" if options.rates else "-drafts"
    name = f"progressive{kind}-{facts['date']}-cpu"
    codec_report.write(options.out, name, facts, text, tables)
    print(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progressive", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--rates", default="200mbit,1gbit,10gbit", help=f"of the link, as tc has them, or {UNLIMITED}; '' for none"
    )
    parser.add_argument("--tokens", default="4096", help="lengths of prompts, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="prompts of each length, 11 at most")
    parser.add_argument("--codecs", default=CODECS, help="with commas; the first is the baseline")
    parser.add_argument("--cold", action="store_true", help="no prefix cache on the prefill worker")
    parser.add_argument("--drafts-tokens", default="2000,2400", help="contexts for accepted drafts; '' for none")
    parser.add_argument("--drafts-rate", default="15mbit", help="of the link while these are made")
    parser.add_argument("--port", type=int, default=18710, help="first of four ports")
    parser.add_argument("--out", type=Path, default=codec_report.RESULTS)
    parser.add_argument("--namespaces", help=argparse.SUPPRESS)  # set where this command starts itself anew
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the link and run on it; returns the exit status."""
    options = parse(argv)
    if options.namespaces:
        run_inside(options)
        return 0
    try:
        with linked(UNLIMITED) as spaces:
            again: list[Any] = [
                sys.executable,
                "-m",
                "benchmarks.progressive",
                *(sys.argv[1:] if argv is None else argv),
            ]
            inside = ["ip", "netns", "exec", spaces[1], *again, "--namespaces", ",".join(spaces)]
            return subprocess.run(inside).returncode
    except FileNotFoundError as error:
        print(f"skipped: {error.filename} is not installed; it is part of iproute2")
    except subprocess.CalledProcessError as error:
        print(f"skipped: {' '.join(error.cmd)} failed: {error.stderr.strip()}; network namespaces need root")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
