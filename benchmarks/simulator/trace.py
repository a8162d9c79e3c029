"""Traces of requests: their published form, and generators of the two that docs/scheduling.md compares policies on.

One JSON object a line, ordered by arrival. Either ours,

    {"arrival": 0.25, "prompt_tokens": 2210, "output_tokens": 128, "prefix": 17, "prefix_tokens": 2000, "key": "a"}

arrival: seconds from the beginning. prefix: a name of what the prompt begins with, null or absent where it shares
nothing; prefix_tokens: how long that is. key: whose request it is. Or Mooncake's (https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces), with a number for each block of 512 tokens:

    {"timestamp": 250, "input_length": 2210, "output_length": 128, "hash_ids": [3, 7, 8, 9, 10]}
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace; blocks: Mooncake's hash_ids, of MOONCAKE_BLOCK tokens each."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None
    prefix_tokens: int = 0
    key: str = ""
    blocks: tuple[int, ...] = ()

    def pages(self, number: int, page_size: int) -> list[int]:
        """Digests of the prompt's full pages; equal for equal beginnings. number: of the request in its trace."""
        found = []
        for page in range(self.prompt_tokens // page_size):
            block = (page + 1) * page_size // MOONCAKE_BLOCK - (not (page + 1) * page_size % MOONCAKE_BLOCK)
            if block < len(self.blocks):
                found.append(1 << 62 | self.blocks[block] << 20 | page)
            elif self.prefix is not None and (page + 1) * page_size <= self.prefix_tokens:
                found.append(1 << 61 | self.prefix << 20 | page)
            else:
                found.append(number << 20 | page)
        return found


def read_trace(path: Path) -> list[Request]:
    """The requests of a file in either form."""
    return [_parse(json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write requests in our form."""
    with path.open("w") as out:
        for request in requests:
            entry = {name: value for name, value in asdict(request).items() if name != "blocks"}
            out.write(json.dumps(entry) + "\n")


def _parse(entry: dict[str, object]) -> Request:
    if "timestamp" in entry:
        length, output = int(str(entry["input_length"])), int(str(entry["output_length"]))
        blocks = entry["hash_ids"]
        assert isinstance(blocks, list)
        return Request(float(str(entry["timestamp"])) / 1e3, length, output, blocks=tuple(blocks))
    return Request(**entry)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a generator makes: requests, arrivals a second, shares and lengths in tokens."""

    count: int
    rate: float
    share: float = 0.8  # of requests that begin with one of the prefixes
    prefixes: int = 200
    prefix_tokens: int = 2000
    own_tokens: int = 200  # mean of what no other request has
    output_tokens: int = 128  # mean
    seed: int = 1


def generate(shape: Shape) -> Iterator[Request]:
    """Poisson arrivals; with share 0 prompts are as long, and share nothing."""
    draw = random.Random(shape.seed)
    now = 0.0
    for _ in range(shape.count):
        now += draw.expovariate(shape.rate)
        prefix = draw.randrange(shape.prefixes) if draw.random() < shape.share else None
        own = 1 + round(draw.expovariate(1 / shape.own_tokens))
        output = 1 + round(draw.expovariate(1 / shape.output_tokens))
        shared = shape.prefix_tokens if prefix is not None else 0
        yield Request(now, shape.prefix_tokens + own, output, prefix, shared)
