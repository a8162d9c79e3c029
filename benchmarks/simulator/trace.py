"""Traces as the simulator uses them: pages of a request's prompt, and generators of the two traces that
docs/scheduling.md compares policies on. kvrail.tools.bench.trace has their forms.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrail.tools.bench.trace import MOONCAKE_BLOCK, Request


def pages(request: Request, number: int, page_size: int) -> list[int]:
    """Digests of the prompt's full pages; equal for equal beginnings. number: of the request in its trace."""
    found = []
    for page in range(request.prompt_tokens // page_size):
        block = (page + 1) * page_size // MOONCAKE_BLOCK - (not (page + 1) * page_size % MOONCAKE_BLOCK)
        if block < len(request.blocks):
            found.append(1 << 62 | request.blocks[block] << 20 | page)
        elif request.prefix is not None and (page + 1) * page_size <= request.prefix_tokens:
            found.append(1 << 61 | request.prefix << 20 | page)
        else:
            found.append(number << 20 | page)
    return found


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write requests in our form."""
    with path.open("w") as out:
        for request in requests:
            entry = {name: value for name, value in asdict(request).items() if name != "blocks"}
            out.write(json.dumps(entry) + "\n")


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
