"""A crowd of requests: every kind of sampling, prompts of 5 to 3,000 tokens, clients that leave."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.models import VOCAB

LENGTHS = (5, 17, 64, 65, 130, 300, 700, 1500, 3000)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy again": {"temperature": 0, "ignore_eos": True},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "min-p": {"temperature": 1.2, "min_p": 0.05},
    "all tokens": {"temperature": 1.0},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3},
    "bias": {"temperature": 1.0, "logit_bias": {"65": 3.0, "66": -100.0}},
    "log probabilities": {"temperature": 1.0, "logprobs": 3},
    "several": {"temperature": 1.0, "n": 3},
    "several, greedy": {"temperature": 0, "n": 2},
    "stop strings": {"temperature": 1.0, "stop": ["e", "th"]},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": list(range(40, 60)), "min_tokens": 3},
    "regular expression": {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{4,12}"}},
    "schema": {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}},
    "scored prompt": {"temperature": 1.0, "n": 2, "prompt_logprobs": 1, "stream": False},
    "scored prompt, shown": {"temperature": 0, "echo": True, "logprobs": 1},
}
TRANSFORMERS_KNOWS = "greedy again"
"""The kind whose answers are compared with those of transformers, where computing is in float32."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. leaves: chunks behind which its client closes the connection; 0: it stays."""

    kind: str
    body: dict[str, Any]
    leaves: int = 0


def crowd(count: int, seed: int = 1, longest: int = LENGTHS[-1]) -> Iterator[Asked]:
    """`count` requests; one in ten leaves, one in five has a prompt that begins like another's."""
    rng = random.Random(seed)
    lengths = [length for length in LENGTHS if length <= longest]
    prompts: list[list[int]] = []
    kinds = list(KINDS)
    for number in range(count):
        kind, length = kinds[number % len(kinds)], lengths[number * 5 % len(lengths)]
        prompt = [rng.randrange(256) for _ in range(length)]
        if prompts and rng.random() < 0.2:
            known = rng.choice(prompts)
            prompt = [*known[: rng.randint(1, len(known))], *prompt][: lengths[-1]]
        prompts.append(prompt)
        if kind.startswith("scored"):
            prompt = prompt[:300]
        body = {
            "model": "smoke",
            "prompt": prompt,
            "max_tokens": rng.randint(1, 24),
            "seed": rng.randrange(1 << 31),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **KINDS[kind],
        }
        if not body["stream"]:
            del body["stream_options"]
        body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
        yield Asked(kind, body, leaves=int(number % 10 == 7))


assert VOCAB > 256, "prompts are bytes"
