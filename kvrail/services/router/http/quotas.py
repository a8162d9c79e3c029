"""The limits of one API key of the file (requests and tokens a minute, requests at once), and what it has used.

A minute is the last 60 seconds at each moment. Tokens of prompt and output count when a request has ended: a request
that began within its limit is never cut off, and the next one waits for what it took beyond. The library `limits` has
such windows too, but by the wall clock, which jumps, and it does not count what is beyond a limit.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, MutableMapping
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrail.errors import OverloadedError, RateLimitError
from kvrail.security.keyfile import Key
from kvrail.services.router.errors import error_response
from kvrail.services.router.values import SPENT

log = logging.getLogger("kvrail.router.quotas")

WINDOW_S = 60.0
BUSY_RETRY_S = 1.0
"""After which to try again where a key's own requests are in the way: their end is unknown."""
LIMITS = ("requests", "tokens", "concurrent")
"""What a refused request was too much of."""
HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class Window:
    """Amounts of the last minute."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._taken: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, amount: int) -> None:
        """Take this amount now."""
        if amount:
            self._taken.append((self._clock(), amount))
            self._sum += amount

    @property
    def sum(self) -> int:
        """What was taken in the last minute."""
        begin = self._clock() - WINDOW_S
        while self._taken and self._taken[0][0] <= begin:
            self._sum -= self._taken.popleft()[1]
        return self._sum

    def room_after(self, limit: int) -> float:
        """Seconds until less than `limit` is taken; 0 where it already is."""
        left, wait = self.sum, 0.0
        for at, amount in self._taken:
            if left < limit:
                break
            left, wait = left - amount, at + WINDOW_S - self._clock()
        return wait

    def empty_after(self) -> float:
        """Seconds until nothing is taken."""
        return self._taken[-1][0] + WINDOW_S - self._clock() if self.sum else 0.0


class Quota:
    """What one key has used."""

    def __init__(self) -> None:
        self.requests, self.tokens = Window(), Window()
        self.running = 0

    def excess(self, key: Key) -> tuple[str, str, float] | None:
        """The one of LIMITS that a further request would exceed, in words, and the seconds until it would not."""
        of = f"API key {key.name!r} has"
        if key.requests_per_minute is not None and (wait := self.requests.room_after(key.requests_per_minute)):
            return "requests", f"{of} had its {key.requests_per_minute} requests of a minute", wait
        if key.tokens_per_minute is not None and (wait := self.tokens.room_after(key.tokens_per_minute)):
            return "tokens", f"{of} had its {key.tokens_per_minute} tokens of a minute", wait
        if key.concurrent_requests is not None and self.running >= key.concurrent_requests:
            return "concurrent", f"{of} {self.running} requests at once, the most that it may", BUSY_RETRY_S
        return None

    def headers(self, key: Key) -> dict[str, str]:
        """OpenAI's headers for the limits and what is left of them."""
        found = {}
        for kind, limit, window in (
            ("requests", key.requests_per_minute, self.requests),
            ("tokens", key.tokens_per_minute, self.tokens),
        ):
            if limit is not None:
                values = str(limit), str(max(0, limit - window.sum)), duration(window.empty_after())
                for what, value in zip(("limit", "remaining", "reset"), values, strict=True):
                    found[f"x-ratelimit-{what}-{kind}"] = value
        return found


class KeyMetrics:
    """What keys have used, by their names."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, ["model_name", *labels], registry=registry)

        self._model = model_name
        self._requests = counter("kvrail_key_requests", "Requests by API key of the file.", "key")
        self._tokens = counter("kvrail_key_tokens", "Tokens by API key: of prompts and generated.", "key", "kind")
        self._refused = counter("kvrail_key_refused_requests", "Requests beyond a key's limits.", "key", "limit")
        file_errors = counter("kvrail_key_file_errors", "Changes of the key file that could not be read.")
        self.file_errors = file_errors.labels(model_name)

    def known(self, key: str) -> None:
        """Show a key's series from the start: a rate needs a zero to begin with."""
        self._requests.labels(self._model, key)
        for kind in ("prompt", "generated"):
            self._tokens.labels(self._model, key, kind)
        for limit in LIMITS:
            self._refused.labels(self._model, key, limit)

    def took(self, key: str, prompt: int, generated: int) -> None:
        """Count a request that has ended."""
        self._requests.labels(self._model, key).inc()
        self._tokens.labels(self._model, key, "prompt").inc(prompt)
        self._tokens.labels(self._model, key, "generated").inc(generated)

    def refused(self, key: str, limit: str) -> None:
        """Count a request that was refused."""
        self._refused.labels(self._model, key, limit).inc()


class Quotas:
    """What each key has used, by its name: a key whose secret changes keeps its counts."""

    def __init__(self) -> None:
        self.by_name: defaultdict[str, Quota] = defaultdict(Quota)
        self.metrics: KeyMetrics | None = None


class KeyLimits:
    """Holds each key of the file to its limits, and reports them to clients. Counts POST requests alone."""

    def __init__(self, app: ASGIApp, quotas: Quotas, refused: Callable[[Scope, OverloadedError], object]) -> None:
        """refused: called for each request that goes no further."""
        self._app, self._quotas, self._refused = app, quotas, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        key: Key | None = scope["state"].get("key") if scope["type"] == "http" else None
        if key is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        quota, metrics = self._quotas.by_name[key.name], self._quotas.metrics
        if (excess := quota.excess(key)) is not None:
            limit, words, wait = excess
            error = RateLimitError(f"{words}; retry after {math.ceil(wait)} s", retry_after=wait)
            self._refused(scope, error)
            if metrics is not None:
                metrics.refused(key.name, limit)
            await error_response(error)(scope, receive, _with(quota.headers(key), send))
            return
        quota.requests.add(1)
        quota.running += 1
        try:
            await self._app(scope, receive, _with(quota.headers(key), send))
        finally:
            quota.running -= 1
            self._ended(key, quota, scope["state"])

    def _ended(self, key: Key, quota: Quota, state: MutableMapping[str, Any]) -> None:
        prompt, generated = state.get(SPENT, (0, 0))
        quota.tokens.add(prompt + generated)
        if self._quotas.metrics is not None:
            self._quotas.metrics.took(key.name, prompt, generated)
        log.info("key %s: %d prompt and %d generated tokens", key.name, prompt, generated)


def _with(headers: dict[str, str], send: Send) -> Send:
    """`send` with more headers."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return sending


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1s, 120ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"
