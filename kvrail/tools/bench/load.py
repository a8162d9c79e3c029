"""The load: what is asked, and when. Two loads with equal settings have equal requests."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from kvrail.tools.bench.trace import Trace


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths in tokens, drawn uniformly; both ends are included."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,}–{self.most:,}"


SAMPLING: Mapping[str, Mapping[str, float]] = {
    "sampled": {"temperature": 1},
    "filtered": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "greedy": {"temperature": 0},
}
"""How requests ask for tokens to be drawn, each with a seed of its own. "filtered": as Qwen3's models recommend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send.

    streams: requests that are open at any time (closed loop); rate: requests a second that arrive as a Poisson process
    (open loop); trace: requests that arrive as they once did, `speed` times as fast. One of the three is given.
    prefixes, prefix_tokens: each prompt begins with one of this many shared prefixes, chosen at random. prompt: tokens
    of a prompt after its prefix. vocab: token ids are below this. sampling: a key of SAMPLING.
    """

    requests: int
    streams: int = 0
    rate: float = 0.0
    prompt: Range
    output: Range
    prefixes: int = 0
    prefix_tokens: int = 0
    vocab: int
    seed: int = 0
    sampling: str = "sampled"
    trace: Trace | None = None
    speed: float = 1.0

    def __str__(self) -> str:
        shared = f"{self.prefixes} prefixes of {self.prefix_tokens:,} + " if self.prefixes else ""
        arrivals = f"{self.rate:g} requests/s" if self.rate else f"{self.streams} streams"
        arrivals = f"{self.trace} at speed {self.speed:g}" if self.trace else arrivals
        return f"{shared}{self.prompt} in, {self.output} out, {arrivals}, {self.requests} requests, {self.sampling}"

    @property
    def shared_tokens(self) -> int:
        """Prompts' tokens that other requests of the load have too, at most."""
        return self.trace.shared_tokens if self.trace else self.prefix_tokens * self.requests

    def settings(self) -> dict[str, Any]:
        """All fields for a report; of a trace all but its requests."""
        return asdict(replace(self, trace=None)) | {"trace": self.trace and self.trace.settings()}


def load_of_trace(trace: Trace, **more: Any) -> Load:
    """The load that sends a trace's requests; more: other fields of the load."""
    prompts = [request.prompt_tokens for request in trace.requests]
    outputs = [request.output_tokens for request in trace.requests]
    prompt, output = Range(min(prompts), max(prompts)), Range(min(outputs), max(outputs))
    return Load(requests=len(trace.requests), trace=trace, prompt=prompt, output=output, **more)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. arrival: seconds after the load begins, 0 in a closed loop. body: JSON, as it is sent."""

    arrival: float
    output_tokens: int
    body: bytes


def completion(
    model: str, prompt: Sequence[int], output_tokens: int, *, seed: int, sampling: str, arrival: float = 0.0
) -> Request:
    """A streamed completion of exactly `output_tokens` tokens. sampling: a key of SAMPLING."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        **SAMPLING[sampling],
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(arrival, output_tokens, json.dumps(body).encode())


def requests_of(load: Load, model: str) -> Iterator[Request]:
    """The requests of a load, in order of arrival."""
    parts = _of_trace(load, load.trace) if load.trace else _drawn(load)
    for number, (arrival, prompt, output) in enumerate(parts):
        yield completion(model, prompt, output, seed=load.seed + number, sampling=load.sampling, arrival=arrival)


def _of_trace(load: Load, trace: Trace) -> Iterator[tuple[float, list[int], int]]:
    """Arrivals, prompts and lengths of outputs; the first request arrives at once."""
    first = trace.requests[0].arrival
    for number, request in enumerate(trace.requests):
        arrival = (request.arrival - first) / load.speed
        yield arrival, request.prompt(number, load.seed, load.vocab), request.output_tokens


def _drawn(load: Load) -> Iterator[tuple[float, list[int], int]]:
    """Arrivals, prompts and lengths of outputs. Each property has draws of its own: one can change alone."""
    lengths, choices, tokens, times = (
        random.Random(f"{load.seed} {what}") for what in ("lengths", "prefixes", "tokens", "arrivals")
    )
    ids = range(load.vocab)
    prefixes = [tokens.choices(ids, k=load.prefix_tokens) for _ in range(load.prefixes)]
    for arrival in arrivals(load.rate, load.requests, times):
        prefix = choices.choice(prefixes) if prefixes else []
        own = tokens.choices(ids, k=lengths.randint(load.prompt.least, load.prompt.most))
        output = lengths.randint(load.output.least, load.output.most)
        yield arrival, prefix + own, output


def arrivals(rate: float, count: int, draws: random.Random) -> list[float]:
    """Moments of a Poisson process, in seconds; all 0 where the rate is 0.

    As in `vllm bench serve` they are scaled so that the last arrives at count / rate: no seed makes a load lighter.
    """
    if not rate:
        return [0.0] * count
    moments = list(accumulate(draws.expovariate(rate) for _ in range(count)))
    return [moment * count / rate / moments[-1] for moment in moments]
