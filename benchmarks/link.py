"""KV over a slow link between two machines, which two network namespaces stand in for.

    sudo python -m benchmarks.link [--rate 1gbit] [--tokens 4096,7168] [--rounds 7] [--codecs raw,splitzip]
    sudo python -m benchmarks.link --shape llama-3.1-8b --device cuda --rate 10gbit --tokens 4096,65536

A prefill worker lives in one namespace, a decode worker and the router in the other; a pair of virtual Ethernet
devices, held to --rate by a token bucket, joins them. The demo model reads real text; with --shape a model of random
weights reads random tokens. With --device cuda each worker has a GPU, or a half of the only one. The prefill worker has
a prompt's KV already, so that what is measured is the transfer. Correctness first: with every codec the client must get
the same text. The codecs take turns; the figures are medians. Where namespaces are not permitted, it says so and ends.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import codec_report
from benchmarks.codec_data import DEMO, SMALL_VOCABULARY, corpus
from benchmarks.codec_tables import Table
from benchmarks.facts import RESULTS, facts_of, hardware
from benchmarks.shapes import SHAPES, card_of, weight_bytes, write_shape
from kvrail.codec import registry
from kvrail.text import load_tokenizer

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
PREFILL_HOST, DECODE_HOST = "10.77.0.1", "10.77.0.2"
GATE = (
    "KV from a prefill worker in one network namespace to a decode worker in another.\n"
    "Every answer was the same text with every codec."
)
MOST_KV_GIB = 40
"""KV memory of each worker where two share a GPU, if there is enough."""
LEAST_KV_GIB = 2.5
"""Less would hold no prompt of 8,192 tokens of a large model."""
BESIDE_GB = 6.0
"""What a worker takes of a GPU besides weights and KV, while it starts."""
START_SECONDS = 420
OUTPUT_TOKENS = 16
BURST = "256kb"
"""Size of the token bucket: less cannot keep a fast link busy, more lets a transfer through unhindered."""


DEVICE = "kvrail"
"""Name of the link's device in either namespace."""
MODULE = "kvrail"
"""The command `kvrail`."""
UNLIMITED = "unlimited"
"""In place of a rate: as fast as the machine is."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to; seconds: from the call of the prefill worker to the last page in place."""

    text: str
    raw_bytes: int
    payload_bytes: int
    seconds: float


def once_compiled(ask: Callable[[], T], usage: Callable[[T], Mapping[str, Any]]) -> T:
    """The first answer to `ask`, which names a codec, whose KV crossed with it: until it is compiled others serve.

    usage: the `kvrail` member of an answer's usage. Raises RuntimeError where that takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while (reason := usage(answer := ask())["codec_reason"]) is not None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {START_SECONDS} s still: {reason}")
        time.sleep(0.5)
    return answer


class Cluster:
    """A prefill worker, a decode worker without prefix cache, and a router, each a process of its own.

    namespace: network namespace of the prefill worker, None: that of this process; the others run in this one's.
    ports: of the router, the prefill worker, the decode worker and its metrics. shape: of random weights, "" for the
    demo model; device: cpu or cuda. prefill_flags, decode_flags: more flags of the workers. decode_module: what is run
    as the decode worker. Raises SystemExit where the shape does not fit the device, RuntimeError where a start fails.
    """

    def __init__(
        self,
        folder: Path,
        prefill_host: str,
        decode_host: str,
        namespace: str | None,
        ports: Sequence[int],
        shape: str = "",
        device: str = "cpu",
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        decode_module: str = MODULE,
    ) -> None:
        self._folder = folder
        self.model = shape or DEMO.name
        model = ["--model", str(write_shape(shape, folder / "model")), "--served-model-name", shape] if shape else []
        weights = ["--load-format", "dummy"] if shape else []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = f"http://{decode_host}:{ports[0]}"
        self._metrics = f"http://{decode_host}:{ports[3]}/metrics"
        prefill, decode = f"{prefill_host}:{ports[1]}", f"{decode_host}:{ports[2]}"
        try:
            ends = devices(device, shape)
            weights += ["--transport", "tcp"]  # UCX would find a way within one machine that no link limits
            flags = [*model, *weights, *ends[0], *prefill_flags]
            self._start("prefill", prefill, "--metrics-port", "0", *flags, namespace=namespace)
            flags = [*model, *weights, *ends[1], *decode_flags]
            self._start(
                "decode", decode, "--metrics-port", str(ports[3]), "--no-prefix-cache", *flags, module=decode_module
            )
            workers = ["--prefill-workers", prefill, "--decode-workers", decode]
            self._start("router", f"{decode_host}:{ports[0]}", *workers, *model)
            self._wait()
        except BaseException:
            self.stop()
            raise

    def ask(self, prompt: Sequence[int], codec: str) -> Answer:
        """One greedy completion whose KV crosses with `codec`. Raises RuntimeError where it does not."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "kvrail": {"codec": codec},
        }
        seconds, text, usage = once_compiled(lambda: self._ask(body), lambda answer: answer[2])
        if usage["codec"] != codec or not usage["kv_bytes"]:
            raise RuntimeError(f"KV should have crossed with {codec}; the usage is {usage}")
        return Answer(text, usage["kv_raw_bytes"], usage["kv_bytes"], seconds)

    def _ask(self, body: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
        """Seconds of the transfer, text, and usage."""
        before = self._transfer_seconds()
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        answer = response.json()
        seconds = self._transfer_seconds() - before
        return seconds, answer["choices"][0]["text"], answer["usage"]["kvrail"]

    def logs(self) -> str:
        """The end of what each process has logged."""
        files = (path for path in sorted(self._folder.iterdir()) if path.is_file())
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in files)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()

    def _start(self, role: str, address: str, *flags: str, namespace: str | None = None, module: str = MODULE) -> None:
        host, _, port = address.rpartition(":")
        command = ["ip", "netns", "exec", namespace] if namespace else []
        command += [sys.executable, "-m", module, role, "--host", host, "--port", port, *flags]
        with (self._folder / role).open("wb") as log:
            self._processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            with suppress(httpx.HTTPError):
                health = httpx.get(f"{self.url}/health", timeout=2).json()
                workers = health["decode_workers"] | health["prefill_workers"]
                if all(worker["state"] == "healthy" for worker in workers.values()):
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the cluster did not become healthy:\n{self.logs()}")

    def _transfer_seconds(self) -> float:
        families = text_string_to_metric_families(httpx.get(self._metrics, timeout=30).text)
        samples = (sample for family in families for sample in family.samples)
        return sum(
            sample.value
            for sample in samples
            if sample.name == "kvrail_kv_transfer_seconds_sum" and sample.labels["direction"] == "received"
        )


@contextmanager
def linked(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces with a link of `rate` between them: their names. Raises CalledProcessError where that fails.

    `limit` changes the rate.
    """
    spaces = [f"kvrail-{role}-{os.getpid()}" for role in ("prefill", "decode")]
    devices = [f"kvr{side}{os.getpid()}" for side in "pd"]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for space, device, host in zip(spaces, devices, (PREFILL_HOST, DECODE_HOST), strict=True):
            _ip("link", "set", device, "netns", space, "name", DEVICE)
            _ip("-n", space, "addr", "add", f"{host}/24", "dev", DEVICE)
            for name in (DEVICE, "lo"):
                _ip("-n", space, "link", "set", name, "up")
        limit(spaces, rate)
        yield spaces[0], spaces[1]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        subprocess.run(["ip", "link", "del", devices[0]], capture_output=True)


def limit(spaces: Sequence[str], rate: str) -> None:
    """Hold the link between two namespaces of `linked` to `rate`, as tc has it, both ways; UNLIMITED: not at all."""
    bucket = ["pfifo"] if rate == UNLIMITED else ["tbf", "rate", rate, "burst", BURST, "latency", "50ms"]
    for space in spaces:
        _run("tc", "-n", space, "qdisc", "replace", "dev", DEVICE, "root", *bucket)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def devices(device: str, shape: str = "") -> tuple[list[str], list[str]]:
    """Flags that give the prefill and the decode worker their devices.

    Raises SystemExit where a GPU has too little memory for the weights of `shape`.
    """
    if device == "cpu":
        return [], []
    alone = torch.cuda.device_count() > 1
    weights, memory = weight_bytes(shape) if shape else 0, torch.cuda.get_device_properties(0).total_memory
    kv_gib = (memory / (1 if alone else 2) - weights - BESIDE_GB * 1e9) / 2**30
    if kv_gib < LEAST_KV_GIB:
        many = "" if alone else " twice"
        raise SystemExit(
            f"{shape} has {weights / 1e9:.0f} GB of weights, too many{many} on a GPU of {memory / 1e9:.0f} GB;"
            " take two GPUs or a smaller --shape"
        )
    if alone:
        return ["--device", "cuda:0"], ["--device", "cuda:1"]
    shared = ["--device", "cuda:0", "--kv-memory-gib", f"{min(kv_gib, MOST_KV_GIB):.3g}"]
    return shared, shared


def machine(device: str, facts: dict[str, str]) -> str:
    """A word for the machine, for names of results; where there are two GPUs, `facts` get both."""
    if device == "cpu":
        return device
    count, name = min(2, torch.cuda.device_count()), torch.cuda.get_device_name()
    facts["hardware"] = f"{count} {name} of one host"
    return f"{count}x{card_of(name)}"


def prompt_of(length: int, shape: str = "", number: int = 0) -> list[int]:
    """The first tokens of real text; of a model of random weights, random ones, other ones for each `number`."""
    if shape:
        draws = random.Random(length << 16 | number)
        return [draws.randrange(SMALL_VOCABULARY) for _ in range(length)]
    tokens = load_tokenizer(str(DEMO)).encode(corpus(), add_special_tokens=True)
    if len(tokens) < length:
        raise SystemExit(f"the text has {len(tokens)} tokens, not {length}; ask for fewer with --tokens")
    return tokens[:length]


def measure(cluster: Cluster, prompt: Sequence[int], codecs: Sequence[str], rounds: int) -> dict[str, list[Answer]]:
    """Answers by codec, in turn, after one each that is not counted. Raises SystemExit where texts differ."""
    cluster.ask(prompt, codecs[0])  # the prefill worker computes the prompt; from here on it has all but its end
    text = cluster.ask(prompt, codecs[0]).text
    answers: dict[str, list[Answer]] = {codec: [] for codec in codecs}
    for number in range(rounds + 1):
        for codec in codecs:
            answer = cluster.ask(prompt, codec)
            if answer.text != text:
                raise SystemExit(f"{codec} gave {answer.text!r}; {codecs[0]} gave {text!r}")
            if number:
                answers[codec].append(answer)
    return answers


def table(length: int, rate: str, answers: dict[str, list[Answer]]) -> Table:
    """Medians of one length."""
    first = next(iter(answers))
    base = statistics.median(answer.seconds for answer in answers[first])
    rows = []
    for codec, found in answers.items():
        seconds = sorted(answer.seconds for answer in found)
        middle, raw, payload = statistics.median(seconds), found[0].raw_bytes, found[0].payload_bytes
        cells = [f"{raw / payload:.3f}", f"{middle * 1e3:.1f}", f"{seconds[0] * 1e3:.1f}", f"{seconds[-1] * 1e3:.1f}"]
        rows.append(
            [codec, f"{payload / 1e6:.1f}", *cells, f"{payload * 8 / middle / 1e9:.3f}", f"{base / middle:.2f}"]
        )
    header = ("codec", "MB", "ratio", "median ms", "least", "most", "Gb/s of link", f"{first} over this")
    notes = f"{len(found)} transfers each, in turn; from the call of the prefill worker to the last page in place."
    return Table(f"{length:,} tokens at {rate}", header, rows, notes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.link", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rate", default="1gbit", help="rate of the link, as tc has it")
    parser.add_argument("--tokens", default="4096,7168", help="lengths of prompts, with commas")
    parser.add_argument("--rounds", type=int, default=7, help="transfers of each codec and length")
    exact = [name for name in registry.names() if registry.get(name).exact]
    parser.add_argument("--codecs", default=",".join(exact), help="with commas; the first is the baseline")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="", help="random weights of this shape")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the workers run")
    parser.add_argument("--max-frame-mib", type=int, default=0, help="MiB of KV that a frame holds at most; 0: as ever")
    parser.add_argument("--port", type=int, default=18700, help="first of four ports")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--namespaces", help=argparse.SUPPRESS)  # set when this command starts itself again
    return parser.parse_args(argv)


def run_inside(options: argparse.Namespace) -> None:
    """In the decode worker's namespace: start the cluster, measure, write."""
    codecs, tables = options.codecs.split(","), []
    facts = facts_of("benchmarks.link", hardware(options.device))
    facts["command"] = facts["command"].split(" --namespaces")[0]
    with tempfile.TemporaryDirectory() as folder:
        ports = range(options.port, options.port + 4)
        hosts = PREFILL_HOST, DECODE_HOST
        bound = ["--transfer-memory-mib", str(8 * options.max_frame_mib)] if options.max_frame_mib else []
        space, shape = options.namespaces.split(",")[0], options.shape
        cluster = Cluster(Path(folder), *hosts, space, ports, shape, options.device, decode_flags=bound)
        try:
            for length in map(int, options.tokens.split(",")):
                answers = measure(cluster, prompt_of(length, options.shape), codecs, options.rounds)
                print(f"{length} tokens done", flush=True)
                tables.append(table(length, options.rate, answers))
        finally:
            cluster.stop()
    name = f"codec-link-{facts['date']}-{machine(options.device, facts)}"
    text = codec_report.markdown(facts, "KV over a slow link", GATE, tables)
    codec_report.write(options.out, name, facts, text, tables)
    print(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Build the link and run on it; returns the exit status."""
    options = parse(argv)
    if options.namespaces:
        run_inside(options)
        return 0
    return again_linked("benchmarks.link", sys.argv[1:] if argv is None else argv, options.rate)


def again_linked(module: str, argv: Sequence[str], rate: str) -> int:
    """Build the link and start a benchmark again in the decode worker's namespace, with `--namespaces`; its status."""
    try:
        with linked(rate) as spaces:
            again = [sys.executable, "-m", module, *argv, "--namespaces", ",".join(spaces)]
            return subprocess.run(["ip", "netns", "exec", spaces[1], *again]).returncode
    except FileNotFoundError as error:
        print(f"skipped: {error.filename} is not installed; it is part of iproute2")
    except subprocess.CalledProcessError as error:
        print(f"skipped: {' '.join(error.cmd)} failed: {error.stderr.strip()}; network namespaces need root")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
