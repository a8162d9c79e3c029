"""Bodies as no client means them: tiny, huge, deep, wide, of wrong types, cut, flipped, or no JSON at all.

python -m tests.router.fuzz URL COUNT SEED sends so many and prints, as JSON, how many were answered with which status,
and the answers that none should get.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

SIDE_BY_SIDE = 4
STATUSES = {200, 400, 404, 413, 429}
"""None of them says that the server failed."""
LARGE = 1_000_000
"""Bytes, about, of the large ones."""
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4, "logprobs": 1, "stop": ["x"], "echo": True},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [40, 41, 42]},
}
FIELDS = [
    "messages",
    "prompt",
    "max_tokens",
    "tokens",
    "n",
    "stop",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "stream",
    "stream_options",
    "kvrail",
    "tools",
    "response_format",
    "structured_outputs",
    "json_schema",
    "grammar",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "stop_token_ids",
    "min_tokens",
    "model",
    "user",
    "unknown",
    "repetition_penalty",
    "presence_penalty",
    "echo",
    "suffix",
    "best_of",
    "add_generation_prompt",
    "continue_final_message",
]
RAW = [
    "NaN",
    "-Infinity",
    "Infinity",
    "1e999",
    "-1e999",
    "1e-999",
    "-0.0",
    "99999999999999999999999",
    "0.1e1",
    "01",
    "1.",
    "+1",
    "nul",
    "tru",
    "'x'",
    '"\\ud800"',
    '"\\u0000"',
    '"\\uD83D\\uDE00"',
    '"\\x"',
    '{"":1}',
    '{"a":1,"a":2}',
    "[,]",
    "{,}",
    "[1,]",
    "//",
]


@dataclass(frozen=True, slots=True)
class Sent:
    """One request as it leaves."""

    path: str
    content: bytes
    content_type: str = "application/json"


def sent(rng: random.Random) -> Sent:
    """Draw one."""
    path = rng.choice(list(VALID))
    kind = rng.choice((_field, _field, _field, _raw, _bytes, _shape))
    content = kind(rng, dict(VALID[path]))
    content_type = "application/json" if rng.random() < 0.95 else rng.choice(("", "text/plain", "application/x", "é;="))
    return Sent(path, content, content_type)


def _field(rng: random.Random, body: dict[str, Any]) -> bytes:
    """One or a few fields of other values."""
    for _ in range(rng.randint(1, 3)):
        body[rng.choice([*body, *FIELDS])] = _value(rng, 4)
    return json.dumps(body).encode()


def _raw(rng: random.Random, body: dict[str, Any]) -> bytes:
    """One field of what JSON hardly knows, or does not."""
    body[rng.choice([*body, *FIELDS])] = "@"
    return json.dumps(body).replace('"@"', rng.choice(RAW)).encode()


def _bytes(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body cut, flipped, doubled, in another encoding, or noise."""
    text = json.dumps(body)
    content = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return rng.choice(
        (
            bytes(content),
            text.encode()[: rng.randrange(len(text))],
            text.encode() * 2,
            text.encode("utf-16"),
            b"\xef\xbb\xbf" + text.encode(),
            rng.randbytes(rng.randrange(2000)),
            b"",
        )
    )


def _shape(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Very deep, very wide, or very long."""
    most = rng.choice((8 * LARGE, 9 * LARGE)) if rng.random() < 0.2 else LARGE  # of 9 MB none is taken
    size = rng.choice((1000, 30_000, LARGE, most))
    field = rng.choice(list(body))
    inside = rng.choice(
        (
            "[" * size,
            "[" * size + "]" * size,
            '{"a":' * (size // 5) + "1" + "}" * (size // 5),
            "[" + "1," * (size // 2) + "1]",
            "[" + "[]," * (size // 3) + "[]]",
            "[" + '{"role":"user","content":"a"},' * (size // 30) + "1]",
            "[" + '"a",' * (size // 4) + '"a"]',
            "{" + ",".join(f'"{i}":1' for i in range(size // 10)) + "}",
            '"' + "a " * (size // 2) + '"',
            '"' + "\\u00e9" * (size // 6) + '"',
            "9" * size,
            "-0." + "9" * size,
            " " * size + "1",
        )
    )
    return json.dumps({**body, field: "@"}).replace('"@"', inside).encode()


def _value(rng: random.Random, depth: int) -> Any:
    draw = rng.randrange(12 if depth else 9)
    if draw < 9:
        return (
            None,
            rng.random() < 0.5,
            rng.choice((0, 1, -1, 2, 127, 128, 129, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40)),
            rng.choice((0.0, -0.0, 1e-46, 5e-324, 1e308, -1e308, 0.5, 1.5, 2.0000001)),
            rng.choice(("", "a", "\0", "é", "\U0001f600", "text", "none", "auto", "int4", "{{", "{% x", "<|end|>")),
            rng.choice(("a" * 5000, "\n" * 3000, "é" * 4000)),
            rng.choice(([], {}, [[]], [{}], [None], {"": None})),
            [rng.randrange(300) for _ in range(rng.randrange(600))],
            [{"role": rng.choice(("user", "tool", "", "system")), "content": _text(rng)} for _ in range(3)],
        )[draw]
    if draw == 9:
        return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    names = ["type", "text", "include_usage", "codec", "provisional", "trace", "5", "most", "self", *FIELDS]
    return {rng.choice(names): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _text(rng: random.Random) -> Any:
    return rng.choice(("hi", "", None, [{"type": "text", "text": "hi"}], [{"type": "image_url"}], 5, "forbidden"))


async def send(url: str, count: int, seed: int) -> dict[str, Any]:
    """Send `count` of them, a few at a time."""
    rng, statuses, wrong = random.Random(seed), Counter(), []

    async def one(http: httpx.AsyncClient) -> None:
        what = sent(rng)
        headers = {"content-type": what.content_type.encode()} if what.content_type else {}
        answer = await http.post(what.path, content=what.content, headers=headers)
        statuses[answer.status_code] += 1
        if answer.status_code not in STATUSES or not (answer.status_code == 200 or _is_error(answer.text)):
            wrong.append([what.path, repr(what.content[:300]), answer.status_code, answer.text[:300]])

    async def some(http: httpx.AsyncClient) -> None:
        for _ in range(count // SIDE_BY_SIDE):
            await one(http)

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(some(http) for _ in range(SIDE_BY_SIDE)))
    return {"statuses": statuses, "wrong": wrong}


def _is_error(text: str) -> bool:
    error = json.loads(text)["error"]
    return bool(error["message"] and error["type"])


if __name__ == "__main__":
    print(json.dumps(asyncio.run(send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))  # noqa: T201
