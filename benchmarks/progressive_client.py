"""One streamed completion as its client sees it: when which token was there, drafted or verified."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.link import once_compiled

TIMEOUT_S = 600


@dataclass(slots=True)
class Trace:
    """One answer. verified, shown: (seconds since the request was sent, tokens so far), in order of arrival.

    shown: the tokens on a screen that shows drafts too. usage: the `kvrail` member of the usage at the end.
    """

    text: str = ""
    verified: list[tuple[float, int]] = field(default_factory=list)
    shown: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    def verified_at(self, k: int) -> float:
        """Seconds until the client had k verified tokens; raises ValueError where it never had."""
        return _reached(self.verified, k)

    def shown_at(self, k: int) -> float:
        """Seconds until the client first saw a k-th token, draft or not; raises ValueError where it never did."""
        return _reached(self.shown, k)

    def kept_at(self, k: int) -> float:
        """Seconds until the client first saw the k-th token of the answer, drafted or verified.

        Raises ValueError where it never did.
        """
        drafted = 1 < k <= 1 + self.usage["drafts_accepted"]
        return self.shown_at(k) if drafted else self.verified_at(k)

    def take(self, chunk: dict[str, Any], seconds: float) -> None:
        """Add a chunk that arrived after `seconds`. Raises RuntimeError where it is an error."""
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        usage = chunk["usage"] or {}
        self.usage = usage.get("kvrail", self.usage)
        news = chunk.get("kvrail", {})
        if draft := news.get("provisional"):
            self.shown.append((seconds, draft["position"] + draft["tokens"]))
        elif not news and usage.get("completion_tokens"):
            self.verified.append((seconds, usage["completion_tokens"]))
            self.shown.append((seconds, usage["completion_tokens"]))
        for choice in chunk["choices"]:
            self.text += choice["text"]


def _reached(counts: Sequence[tuple[float, int]], k: int) -> float:
    for seconds, count in counts:
        if count >= k:
            return seconds
    raise ValueError(f"the answer never came to {k} tokens; ask for more output tokens")


def ask(
    client: httpx.Client,
    model: str,
    prompt: Sequence[int],
    tokens: int,
    codec: str,
    *,
    provisional: bool,
    seed: int = 0,
) -> Trace:
    """Stream one greedy completion of `tokens` tokens whose KV crosses with `codec`.

    client: with the cluster's URL; one for many requests, as users have it, for to make one takes 20 ms. codec: a
    codec's name, or auto. seed: draws nothing, but see benchmarks/imposed_decode.py. Raises RuntimeError where it
    fails, has another number of tokens, or the KV did not cross as asked.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "kvrail": {"codec": codec, "provisional": provisional},
    }

    def once() -> Trace:
        trace = Trace()
        begin = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    trace.take(json.loads(line.removeprefix("data: ")), time.perf_counter() - begin)
        return trace

    trace = once() if codec == "auto" else once_compiled(once, lambda trace: trace.usage)
    if not trace.usage.get("kv_bytes") or codec not in ("auto", trace.usage["codec"]):
        raise RuntimeError(f"KV should have crossed with {codec}; the usage is {trace.usage}")
    if trace.verified[-1][1] != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for with {codec}, but {trace.verified[-1][1]} came")
    return trace
