"""Traces of requests: when they came, how long they were, and what they shared.

One JSON object a line, ordered by arrival. Either ours,

    {"arrival": 0.25, "prompt_tokens": 2210, "output_tokens": 128, "prefix": 17, "prefix_tokens": 2000, "key": "a"}

arrival: seconds from the beginning. prefix: a name of what the prompt begins with, null or absent where it shares
nothing; prefix_tokens: how long that is. key: whose request it is. Or Mooncake's (https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces), with a number for each block of 512 tokens; a prompt's last may be cut short:

    {"timestamp": 250, "input_length": 2210, "output_length": 128, "hash_ids": [3, 7, 8, 9, 10]}
"""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvrail.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens of a block in Mooncake's traces."""
OURS = {"arrival", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens", "key"}


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

    def parts(self, number: int) -> Iterator[tuple[str, int]]:
        """Names of the prompt's parts, and their tokens. number: of the request in its trace.

        Equal names are equal tokens, cut short or not. What comes last no other request has.
        """
        left = self.prompt_tokens
        shared = [(f"block {block}", MOONCAKE_BLOCK) for block in self.blocks]
        shared += [(f"prefix {self.prefix}", self.prefix_tokens)] if self.prefix is not None else []
        for name, length in (*shared, (f"own {number}", left)):
            yield name, min(length, left)
            left -= min(length, left)

    def prompt(self, number: int, seed: int, vocab: int) -> list[int]:
        """Token ids below vocab, prompt_tokens of them; each part has random draws of its own."""
        found = (random.Random(f"{seed} {name}").choices(range(vocab), k=length) for name, length in self.parts(number))
        return [token for part in found for token in part]


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests to send, at least one, in order of arrival.

    name: of its file. longest: the most tokens of prompt and output together, None for any; left_out: how many requests
    had more.
    """

    name: str
    requests: tuple[Request, ...]
    longest: int | None = None
    left_out: int = 0

    def __str__(self) -> str:
        left_out = f" ({self.left_out:,} of more than {self.longest:,} tokens left out)" if self.longest else ""
        return f"{self.name}{left_out}"

    @property
    def shared_tokens(self) -> int:
        """Prompts' tokens in parts that an earlier request has too."""
        seen, found = set[str](), 0
        for number, request in enumerate(self.requests):
            parts = dict(request.parts(number))
            found += sum(parts[name] for name in parts.keys() & seen)
            seen |= parts.keys()
        return found

    def settings(self) -> dict[str, Any]:
        """All but the requests."""
        return {"name": self.name, "longest": self.longest, "left_out": self.left_out}

    @classmethod
    def read(cls, path: Path, *, first: int | None = None, longest: int | None = None) -> Self:
        """Take a file's first requests (None: all), and of these those within `longest`. Raises ConfigError."""
        whole = sorted(read_trace(path)[:first], key=lambda request: request.arrival)
        kept = [each for each in whole if longest is None or each.prompt_tokens + each.output_tokens <= longest]
        if not kept:
            within = f"; all {len(whole):,} have more than {longest:,} tokens" if whole else ""
            raise ConfigError(f"{path} has no request to send{within}")
        return cls(path.name, tuple(kept), longest, len(whole) - len(kept))


def read_trace(path: Path) -> list[Request]:
    """The requests of a file in either form. Raises ConfigError, which names the line that is wrong."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [_parse(json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: this is no JSON: {error.msg}") from None
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return found


def _parse(entry: object) -> Request:
    """A line's request. Raises ValueError."""
    if not isinstance(entry, dict):
        raise ValueError("this is no JSON object")
    if "timestamp" in entry:
        blocks = entry.get("hash_ids")
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise ValueError(f"hash_ids has to be a list of whole numbers, not {json.dumps(blocks)}")
        arrival, length = _moment(entry, "timestamp") / 1e3, _whole(entry, "input_length", 1)
        return Request(arrival, length, _whole(entry, "output_length", 1), blocks=tuple(blocks))
    if unknown := sorted(entry.keys() - OURS):
        raise ValueError(f"{unknown[0]} is unknown; a line has {', '.join(sorted(OURS))}, or Mooncake's timestamp")
    arrival, length = _moment(entry, "arrival"), _whole(entry, "prompt_tokens", 1)
    output = _whole(entry, "output_tokens", 1)
    prefix = None if entry.get("prefix") is None else _whole(entry, "prefix", 0)
    shared = _whole({"prefix_tokens": 0} | entry, "prefix_tokens", 0)
    if shared > length:
        raise ValueError(f"prefix_tokens is {shared}, more than the {length} of prompt_tokens")
    return Request(arrival, length, output, prefix, shared, str(entry.get("key", "")))


def _moment(entry: Mapping[str, Any], name: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} has to be a number, at least 0, not {json.dumps(value)}")
    return float(value)


def _whole(entry: Mapping[str, Any], name: str, least: int) -> int:
    value = entry.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} has to be a whole number, at least {least}, not {json.dumps(value)}")
    return value
