"""What the status page shows, as JSON: values of the router's metrics, and what workers report of theirs."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvrail import __version__
from kvrail.services.router.answer.service import RouterService
from kvrail.services.router.fleet.ways import APART, HERE
from kvrail.services.router.fleet.worker import Worker
from kvrail.services.router.page.history import STEP_S, STEPS, History, Sample, quantile
from kvrail.telemetry.readings import Readings
from kvrail.wire.v1 import common_pb2

FRESH_S = 1.0
"""Seconds for which a computed answer serves everybody who asks."""

MOST_CLIENTS = 12
"""Clients that are shown with what they have here, those with most first."""

SERIES = (
    "kvrail_requests_total",
    "kvrail_requests_in_flight",
    "kvrail_queue_prompts",
    "kvrail_queue_clients",
    "kvrail_prompt_tokens_total",
    "kvrail_cached_prompt_tokens_total",
    "kvrail_generation_tokens_total",
    "kvrail_failovers_total",
    "kvrail_prompt_ways_total",
)


class StatusPage:
    """The page's answers, computed at most once in FRESH_S each. Belongs to one event loop."""

    def __init__(self, service: RouterService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._started = clock()
        self._made: dict[tuple[bool, bool], tuple[float, bytes]] = {}
        self._sampling: asyncio.Task[None] | None = None
        self.history = History(service.registry, clock)

    def start(self) -> None:
        """Begin to keep history."""
        self._sampling = asyncio.create_task(self.history.run(), name="status page's history")

    async def close(self) -> None:
        """Stop keeping it."""
        if self._sampling is not None:
            self._sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampling

    def shows_all(self, api_key: int | str | None) -> bool:
        """Whether somebody with this key, by its place or its name, sees more than /health shows everybody."""
        settings = self._service.settings
        closed = settings.api_keys or settings.api_keys_file
        return settings.status_page == "open" or not closed or api_key is not None

    def body(self, *, everything: bool, operators: bool = False) -> bytes:
        """JSON. everything: beside what /health shows. operators: for the admin port, which has no API to chat with.

        Which clients ask is shown there, and by a router without API keys.
        """
        now, settings = self._clock(), self._service.settings
        made = self._made.get((everything, operators))
        if made is None or now - made[0] >= FRESH_S:
            found = self._all() if everything else self._health()
            if everything:
                found["chat"] = not operators
                if not operators and (settings.api_keys or settings.api_keys_file):
                    found = _without_clients(found)
            made = self._made[everything, operators] = now, json.dumps(found, separators=(",", ":")).encode()
        return made[1]

    def _health(self) -> dict[str, Any]:
        """What /health says, a worker a row."""
        _, health = self._service.health()
        return {
            "shown": "health",
            "status": health["status"],
            "model": health["model"],
            "active": health["active_requests"],
            "workers": [
                {"role": role, "address": address, **about}
                for role, group in (("prefill", "prefill_workers"), ("decode", "decode_workers"), ("both", "workers"))
                for address, about in health[group].items()
            ],
        }

    def _all(self) -> dict[str, Any]:
        now = self.history.now()
        service, found = self._service, self._health()
        values = Readings(service.registry, SERIES)
        found["workers"] = [about | _more(self._worker(about)) for about in found["workers"]]
        reports = [worker.answer.report for worker in service.pool.decode.values() if worker.answer is not None]
        return found | {
            "shown": "all",
            "version": __version__,
            "uptime_s": round(self._clock() - self._started, 3),
            "limit": service.settings.max_concurrent_requests,
            "policy": service.settings.policy,
            "queue": {"prompts": values.total("kvrail_queue_prompts"), "clients": values.total("kvrail_queue_clients")},
            "requests": values.by("kvrail_requests_in_flight", "state"),
            "outcomes": values.by("kvrail_requests_total", "outcome"),
            "failovers": values.total("kvrail_failovers_total"),
            "tokens": {
                "prompt": values.total("kvrail_prompt_tokens_total"),
                "cached": values.total("kvrail_cached_prompt_tokens_total"),
                "generated": values.total("kvrail_generation_tokens_total"),
            },
            "ways": {way: values.by("kvrail_prompt_ways_total", "reason", way=way) for way in (HERE, APART)},
            "split": self._split(now),
            "percentiles": self._percentiles(now),
            "notable": service.recent.notable(),
            "changes": service.pool.changes.all(),
            "clients": dict(sorted(service.admission.by_client.items(), key=lambda each: -each[1])[:MOST_CLIENTS]),
            "kv": _by_codec(reports),
            "drafts": {
                "proposed": sum(report.drafts_proposed for report in reports),
                "accepted": sum(report.drafts_accepted for report in reports),
            },
            "history": {
                "step_s": STEP_S,
                "steps": STEPS,
                "tokens_per_s": self.history.rates(lambda sample: sample.tokens),
                "requests_per_s": self.history.rates(lambda sample: sample.requests),
            },
        }

    def _worker(self, about: dict[str, Any]) -> Worker:
        pool, role, address = self._service.pool, about["role"], about["address"]
        return pool.leaving.get((role, address)) or (pool.prefill if role == "prefill" else pool.decode)[address]

    def _split(self, now: Sample) -> dict[str, Any]:
        """Where the time of requests went that were answered of late, or, where none was, since the start."""
        then = self.history.oldest
        recent = now.answered > then.answered
        answered = now.answered - (then.answered if recent else 0)
        return {
            "recent_s": round(now.at - then.at) if recent else None,
            "requests": answered,
            "seconds": now.seconds - (then.seconds if recent else 0),
            "parts": {
                name: seconds - (then.parts.get(name, 0.0) if recent else 0) for name, seconds in now.parts.items()
            },
        }

    def _percentiles(self, now: Sample) -> dict[str, dict[str, float | None]]:
        """Median and 99th percentile of first tokens and of gaps between tokens, of late; None: there were none."""
        then = self.history.oldest
        pairs = {"first_token_s": (then.first, now.first), "gap_s": (then.gaps, now.gaps)}
        return {name: {"p50": quantile(0.5, *pair), "p99": quantile(0.99, *pair)} for name, pair in pairs.items()}


def _without_clients(found: dict[str, Any]) -> dict[str, Any]:
    """What is shown, without keys' names and addresses of clients."""
    notable = [each | {"client": ""} for each in found["notable"]]
    return found | {"clients": None, "notable": notable}


def _more(worker: Worker) -> dict[str, Any]:
    """What a worker has said of itself and /health does not show."""
    answer = worker.answer
    if answer is None:
        return {}
    return {
        "max_running": answer.max_running,
        "max_waiting": answer.max_waiting,
        "ours": worker.requests,
        "links": dict(sorted(answer.report.link_bytes_per_s.items())),
        "device": answer.report.device,
        "memory_used": answer.report.memory_used,
        "memory_total": answer.report.memory_total,
        "compiling": list(answer.report.compiling),
        "kv_in_clear": answer.kv_in_clear,
    }


def _by_codec(reports: list[common_pb2.WorkerReport]) -> dict[str, dict[str, int]]:
    """Bytes that decode workers received, by codec."""
    raw: Counter[str] = Counter()
    payload: Counter[str] = Counter()
    for report in reports:
        for each in report.received:
            raw[each.codec] += each.raw_bytes
            payload[each.codec] += each.payload_bytes
    return {codec: {"raw": raw[codec], "payload": payload[codec]} for codec in sorted(payload)}
