"""Clients that know what they must be answered."""

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

PATIENCE_S = 150.0
"""An answer that is not over by then hangs: a cut-off worker is found in seconds, and may be met twice."""
PROPER = {"rate_limit_error", "service_unavailable_error", "timeout_error"}
"""Types of errors that say that the cluster, not the request, is at fault, and that asking again may help."""
BETWEEN = "\n---\n"
"""Between the texts of several sequences."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "from", "its", "bark")
CODECS = ("raw", "splitzip", "splitzip-progressive-ans", "auto")


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: full, wrong, refused (a proper error), failed (any other) or hung."""

    kind: str
    detail: str = ""


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of which no two are alike: short and long, of one sequence or three, streamed or not, by many codecs."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        words = rng.choice([rng.randint(1, 6), rng.randint(60, 160), rng.randint(160, 400)])
        made.append(
            {
                "model": "tiny",
                "prompt": f"{number} " + " ".join(rng.choices(WORDS, k=words)),
                "max_tokens": rng.choice([1, 8, 40, 120]),
                "temperature": rng.choice([0.0, 0.8]),
                "seed": number,
                "n": rng.choice([1, 1, 1, 3]),
                "ignore_eos": True,
                "stream": rng.random() < 0.7,
                "kvrail": {"codec": rng.choice(CODECS)},
            }
        )
    return made


class Refusal(Exception):
    """What a client got in place of an answer; kind: the type of the error, as the API names it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """The texts of an answer, one below the other. Raises Refusal, also where a stream fails in the middle."""
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise _refusal(answer.text)
        return BETWEEN.join(choice["text"] for choice in answer.json()["choices"])
    texts = [""] * body["n"]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise _refusal((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return BETWEEN.join(texts)
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise _refusal(line[6:])
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
    raise Refusal("none", "the stream ended without [DONE]")


def _refusal(said: str) -> Refusal:
    error = json.loads(said)["error"]
    return Refusal(error["type"], error["message"])


async def outcome(client: httpx.AsyncClient, body: dict[str, Any], wanted: str) -> Outcome:
    """What became of one request."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            text = await ask(client, body)
    except TimeoutError:
        return Outcome("hung", repr(body)[:200])
    except Refusal as refusal:
        return Outcome("refused" if refusal.kind in PROPER else "failed", str(refusal))
    except (httpx.HTTPError, ValueError) as error:
        return Outcome("failed", repr(error))
    return Outcome("full") if text == wanted else Outcome("wrong", f"{body!r}: {text!r}, not {wanted!r}")


async def storm(url: str, asked: Iterable[tuple[dict[str, Any], str]], clients: int) -> list[Outcome]:
    """Ask all, `clients` at a time; each request's outcome."""
    waiting, outcomes = iter(asked), []

    async def one(client: httpx.AsyncClient) -> None:
        for body, wanted in waiting:
            outcomes.append(await outcome(client, body, wanted))

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return outcomes
