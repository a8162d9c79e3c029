"""Progressive delivery over a slow link, as a client sees it: when the k-th token is there, drafted and verified.

    sudo python -m benchmarks.progressive [--rates 200mbit,1gbit] [--tokens 4096] [--rounds 9] [--cold]
    sudo python -m benchmarks.progressive --shape qwen3-32b --device cuda --rates 10gbit --tokens 8192,32768 \\
        --codecs raw,splitzip,splitzip-progressive-ans --acceptance benchmarks/results/progressive-drafts-DATE-cpu.json

The cluster of benchmarks/link.py: a prefill worker in one network namespace, a decode worker and the router in another,
a link of a given rate between them. The demo model reads text that it has not seen; every round is another
prompt, the codecs take turns, and the figures are medians over prompts. What a codec sets up at its first request of a
length and rate, pinned memory and compiled kernels, it sets up for one more prompt, which is not counted. The prefill
worker has a prompt's KV already, so that the transfer is what a client waits for; with --cold it computes the prompt.
Every request asks for drafts, and counts what it sees of them (docs/provisional-streaming.md). Correctness first: with
every exact codec the client must get the same text. Where namespaces are not permitted, it says so and ends.

With --shape a model of random weights reads random tokens. Its drafts say nothing of a real model's, so --acceptance
imposes how many are accepted (benchmarks/imposed_decode.py); texts with imposed drafts are not compared.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import codec_report, imposed_decode, progressive_drafts
from benchmarks.acceptance import Imposed, impose
from benchmarks.anchor_drafts import DRAFTS
from benchmarks.codec_tables import Table
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.link import (
    DECODE_HOST,
    MODULE,
    PREFILL_HOST,
    ROOT,
    UNLIMITED,
    Cluster,
    again_linked,
    limit,
    machine,
    prompt_of,
)
from benchmarks.progressive_client import TIMEOUT_S, Trace, ask
from benchmarks.progressive_tables import Drafted, lynx_table, parts_table, ratio_table, times_table
from benchmarks.shapes import SHAPES
from kvrail.codec import registry

CODECS = "raw,splitzip,splitzip-channel,splitzip-progressive-ans,lynx,lynx-exact,int8,int4,auto"
DRAFTS_TOKENS = "3000,4000"
OUTPUT_TOKENS = 80
"""More than the most drafts, and than the last token whose time is shown."""
FEWEST_TOKENS = 2
"""KV does not cross for the first one."""
WARM_UP_TOKENS, WARM_UP_RATE = 512, "1gbit"
"""Every codec is tried on a prompt so short, on a link so slow that a large model makes drafts and verifies them."""
GATE = (
    "KV from a prefill worker in one network namespace to a decode worker in another; times in seconds, from the\n"
    "request to the client's k-th token. "
)
SAME_TEXT = "With every exact codec{} every answer was the same text."
TRIALS = 4
COMPILE_SECONDS = "300"
"""A codec's kernels are compiled when it is first asked for."""
HELD_MIB = "16384"
"""Room for the later stages of the longest prompt: those of 131,072 tokens weigh 6 GB with llama-3.1-8b."""


class Bench:
    """A cluster, the namespaces around it, and what is asked of it."""

    def __init__(self, cluster: Cluster, spaces: Sequence[str], codecs: Sequence[str], imposed: Imposed) -> None:
        self._model = cluster.model
        self._client = httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S)
        self._spaces = spaces
        self._codecs = codecs
        self._imposed = imposed
        self._begin = time.monotonic()

    def say(self, what: str) -> None:
        """A line about how far this is, with the seconds since the cluster was up."""
        print(f"{time.monotonic() - self._begin:7.1f} s  {what}", flush=True)

    def try_codecs(self, prompt: Sequence[int]) -> None:
        """Every codec once."""
        limit(self._spaces, WARM_UP_RATE)
        for codec in self._codecs:
            self._ask(prompt, codec, seed=DRAFTS)
            self.say(f"{codec} is warm")

    def compute(self, prompts: Sequence[Sequence[int]]) -> None:
        """Every prompt once, with nothing in the way: the prefill worker has its KV from here on."""
        limit(self._spaces, UNLIMITED)
        for prompt in prompts:
            self._ask(prompt, self._codecs[0], FEWEST_TOKENS)
            self.say(f"a prompt of {len(prompt)} tokens is computed")

    def times(
        self, rate: str, prompts: Sequence[Sequence[int]], extra: Sequence[int], *, cold: bool = False
    ) -> dict[str, list[Trace]]:
        """Answers to `prompts` by codec, in turn, after one to `extra` each that is not counted.

        Unless cold, each prompt is computed right before: a prefill worker's pages may not hold several. Raises
        SystemExit where an exact codec gives another text.
        """
        limit(self._spaces, rate)
        for codec in self._codecs:
            self._ask(extra, codec, seed=self._imposed.count(codec, 0))
        self.say(f"{len(extra)} tokens at {rate}: every codec is warm")
        found: dict[str, list[Trace]] = {codec: [] for codec in self._codecs}
        for number, prompt in enumerate(prompts):
            if not cold:
                self.compute([prompt])
                limit(self._spaces, rate)
            for codec in self._codecs:
                trace = self._ask(prompt, codec, seed=self._imposed.count(codec, number))
                self._check(codec, number, trace, found[self._codecs[0]])
                found[codec].append(trace)
                seconds = f"{trace.verified[0][0]:.2f} and {trace.verified[-1][0]:.2f} s"
                self.say(f"{len(prompt)} tokens at {rate}, prompt {number}, {codec}: first and last token at {seconds}")
        return found

    def drafts(self, rate: str, prompts: Sequence[Sequence[int]], codec: str) -> Drafted:
        """Drafts accepted of each prompt. Raises SystemExit where the link was too fast to make them."""
        limit(self._spaces, rate)
        accepted, coded, raw = [], 0, 0
        for prompt in prompts:
            usage = self._fully_drafted(rate, prompt, codec)
            accepted.append(usage["drafts_accepted"])
            coded, raw = coded + usage["kv_bytes"], raw + usage["kv_raw_bytes"]
        self.say(f"{codec}: drafts of {len(prompts)} prompts are verified")
        return Drafted(accepted, 16 * coded / raw)

    def _check(self, codec: str, number: int, trace: Trace, base: Sequence[Trace]) -> None:
        """Raise SystemExit unless an exact text is that of `base`, or imposed drafts were accepted as imposed."""
        if codec in self._imposed.accepted:
            due = min(self._imposed.count(codec, number), trace.usage["drafts_proposed"])
            if trace.usage["drafts_accepted"] != due:
                raise SystemExit(f"{codec}: {due} drafts should have been accepted; the usage is {trace.usage}")
        elif not trace.usage["lossy"] and base[number:] and trace.text != base[number].text:
            raise SystemExit(f"{codec} gave {trace.text!r}; {self._codecs[0]} gave {base[number].text!r}")

    def _fully_drafted(self, rate: str, prompt: Sequence[int], codec: str) -> dict[str, Any]:
        """Usage of an answer for which all drafts were made, or a wrong one: more of them would change nothing.

        A machine that others use too may need a few trials; all at one rate, for on a faster link more of the pages
        that drafts read are refined already.
        """
        for _ in range(TRIALS):
            usage = self._ask(prompt, codec, DRAFTS + FEWEST_TOKENS).usage
            made = usage["drafts_proposed"]
            if made == DRAFTS or usage["drafts_accepted"] < made:
                return usage
        raise SystemExit(
            f"{codec}: {made} of {DRAFTS} drafts were made, and all right; take a slower --drafts-rate than {rate}"
        )

    def _ask(self, prompt: Sequence[int], codec: str, tokens: int = OUTPUT_TOKENS, seed: int = 0) -> Trace:
        return ask(self._client, self._model, prompt, tokens, codec, provisional=True, seed=seed)


class Report:
    """What is written of a run, again with each table, so that a run that stops late leaves most of it."""

    def __init__(self, options: argparse.Namespace, imposed: Imposed) -> None:
        facts = facts_of("benchmarks.progressive", hardware(options.device))
        facts["command"] = _shown(options, facts["command"].split(" --namespaces")[0])
        kind = "-cold" if options.cold else "" if options.rates else "-drafts"
        shape = f"-{options.shape}" if options.shape else ""
        rates = f"-{options.rates.replace(',', '-')}" if options.rates else ""
        self._name = f"progressive{kind}{shape}{rates}-{facts['date']}-{machine(options.device, facts)}"
        model = f"random weights of {options.shape}" if options.shape else "demo model"
        cache = f"prefix cache of the prefill worker {'cold' if options.cold else 'warm'}"
        self._title = f"Progressive delivery, {model}, {cache}"
        same = SAME_TEXT.format(" whose drafts were not imposed" if imposed.accepted else "")
        self._gate = (GATE + (same if options.rates else "")).strip()
        self._facts, self._folder = facts, options.out
        self._tables: list[Table] = []
        self._more: dict[str, object] = {}

    def add(self, *tables: Table, **more: object) -> str:
        """Write `tables` too, and `more` facts into the JSON; gives the whole text."""
        self._tables += tables
        self._more |= more
        text = codec_report.markdown(self._facts, self._title, self._gate, self._tables)
        codec_report.write(self._folder, self._name, {**self._facts, **self._more}, text, self._tables)
        return text


def _shown(options: argparse.Namespace, command: str) -> str:
    """`command` with the repository's own name for a measurement that it has."""
    given = Path(options.acceptance)
    known = RESULTS / given.name
    if given.is_file() and known.is_file() and given.read_bytes() == known.read_bytes():
        return command.replace(str(given), str(known.relative_to(ROOT)))
    return command


def prompts_of(length: int, options: argparse.Namespace) -> list[list[int]]:
    """One for each round and one more. Raises SystemExit where there is not enough text."""
    count = options.rounds + 1
    if options.shape:
        return [prompt_of(length, options.shape, number) for number in range(count)]
    found = progressive_drafts.contexts([length])
    if len(found) < count:
        raise SystemExit(
            f"--rounds {options.rounds} takes {count} texts of {length} tokens, but there are {len(found)};"
            " take fewer rounds or shorter prompts"
        )
    return found[:count]


def measure_times(bench: Bench, report: Report, options: argparse.Namespace, imposed: Imposed) -> None:
    """The tables of when which token is there, for each length and rate."""
    found = {length: prompts_of(length, options) for length in map(int, options.tokens.split(","))}
    bench.try_codecs(prompt_of(WARM_UP_TOKENS, options.shape))
    for length, (*prompts, extra) in found.items():
        for rate in options.rates.split(","):
            answers = bench.times(rate, prompts, extra, cold=options.cold)
            unlike = imposed.accepted.keys()
            table = times_table(length, rate, answers, unlike=unlike, words=not options.shape, notes=imposed.notes())
            lynx = lynx_table(length, rate, answers, options.shape)
            report.add(table, ratio_table(length, rate, answers), lynx, parts_table(length, rate, answers))


def measure_drafts(bench: Bench, report: Report, options: argparse.Namespace) -> None:
    """The table of accepted drafts, over the codecs of several stages."""
    lengths = [int(length) for length in options.drafts_tokens.split(",")]
    prompts = progressive_drafts.contexts(lengths)
    codecs = [name for name in options.codecs.split(",") if name != "auto" and registry.get(name).num_stages > 1]
    bench.compute(prompts)
    accepted, bits = {}, {}
    for codec in codecs:
        found = bench.drafts(options.drafts_rate, prompts, codec)
        accepted[codec], bits[codec] = found.accepted, found.bits
        report.add(accepted=accepted)
    held = progressive_drafts.sizes(prompts, codecs)
    report.add(progressive_drafts.table(lengths, options.drafts_rate, accepted, bits, held))


def run_inside(options: argparse.Namespace) -> None:
    """In the decode worker's namespace: start the cluster, measure, write."""
    codecs, spaces = options.codecs.split(","), options.namespaces.split(",")
    imposed = impose(options.acceptance, codecs, options.rounds) if options.acceptance else Imposed()
    report = Report(options, imposed)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(
            Path(folder),
            PREFILL_HOST,
            DECODE_HOST,
            spaces[0],
            range(options.port, options.port + 4),
            options.shape,
            options.device,
            prefill_flags=[
                *("--transfer-memory-mib", HELD_MIB, "--transfer-timeout-s", COMPILE_SECONDS),
                *(["--no-prefix-cache"] if options.cold else []),
            ],
            decode_flags=["--allow-lossy", "--transfer-timeout-s", COMPILE_SECONDS],
            decode_module=imposed_decode.__name__ if options.acceptance else MODULE,
        )
        try:
            bench = Bench(cluster, spaces, codecs, imposed)
            bench.say(f"the cluster is up, after {time.monotonic() - begin:.1f} s")
            if options.rates:
                measure_times(bench, report, options, imposed)
            if options.drafts_tokens:
                measure_drafts(bench, report, options)
        except Exception:
            print(cluster.logs(), flush=True)
            raise
        finally:
            cluster.stop()
    print(report.add())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progressive", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--rates", default="200mbit,1gbit,10gbit", help=f"of the link, as tc has them, or {UNLIMITED}; '' for none"
    )
    parser.add_argument("--tokens", default="4096", help="lengths of prompts, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="prompts of each length, 11 at most of real text")
    parser.add_argument("--codecs", default=CODECS, help="with commas; the first is the baseline")
    parser.add_argument("--cold", action="store_true", help="no prefix cache on the prefill worker")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="", help="random weights of this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the workers run")
    parser.add_argument(
        "--acceptance", default="", help="accepted drafts to impose: the JSON of a run with --drafts-tokens, or counts"
    )
    parser.add_argument(
        "--drafts-tokens",
        help=f"contexts for accepted drafts, '' for none; default: {DRAFTS_TOKENS}, with --shape or --acceptance none",
    )
    parser.add_argument("--drafts-rate", default="10mbit", help="of the link while these are made")
    parser.add_argument("--port", type=int, default=18710, help="first of four ports")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--namespaces", help=argparse.SUPPRESS)  # set when this command starts itself again
    options = parser.parse_args(argv)
    own = not (options.shape or options.acceptance)
    if options.drafts_tokens is None:
        options.drafts_tokens = DRAFTS_TOKENS if own else ""
    if options.drafts_tokens and not own:
        parser.error("--drafts-tokens measures the demo model's own drafts; leave out --shape and --acceptance")
    if not (options.rates or options.drafts_tokens):
        parser.error("--rates and --drafts-tokens are both empty: there is nothing to measure")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Build the link and run on it; returns the exit status."""
    options = parse(argv)
    if options.namespaces:
        run_inside(options)
        return 0
    return again_linked("benchmarks.progressive", sys.argv[1:] if argv is None else argv, UNLIMITED)


if __name__ == "__main__":
    raise SystemExit(main())
