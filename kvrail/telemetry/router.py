"""What a router measures."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from kvrail.telemetry import buckets
from kvrail.telemetry.making import Make
from kvrail.telemetry.moments import PARTS
from kvrail.telemetry.series import Histogram

COUNTED_TOKENS = (1, 2, 8, 32, 64)
"""Tokens of a choice whose time is measured."""
OUTCOMES = ("stop", "length", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "error")
"""How a request can end at the router; the first two are successes."""
PHASES = ("queue", "prefill", "decode")
SOURCES = ("computed", "cached", "transferred")


class RouterMetrics:
    """What the router measures of each request."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        make = Make(registry, model_name)
        self.outcomes = make.counters("kvrail_requests", "Requests by how they ended.", "outcome", OUTCOMES)
        in_flight = make.gauges(
            "kvrail_requests_in_flight",
            "Admitted requests: waiting for their first token, or running.",
            "state",
            ("waiting", "running"),
        )
        self.waiting, self.running = in_flight["waiting"], in_flight["running"]
        self._measure_times(make)
        self._measure_tokens(make)
        self.failovers = make.counter("kvrail_failovers", "Streams that another decode worker took over.")
        self._measure_scheduling(make)
        self._measure_workers(make)
        self._measure_http(make)

    def _measure_times(self, make: Make) -> None:
        """What is measured of a request's time."""
        self.request_seconds = make.histogram(
            "kvrail_request_seconds", "Time from request to last byte.", buckets.REQUEST
        )
        self.stage_seconds = make.histograms(
            "kvrail_request_stage_seconds",
            "Parts of a request's time; they add up to kvrail_request_seconds.",
            "stage",
            [name for name, _, _ in PARTS],
        )
        self.phase_seconds = make.histograms(
            "kvrail_request_phase_seconds",
            "Time until prefill began, from there to the first token, and from there to the last.",
            "phase",
            PHASES,
            buckets.PHASE,
        )
        self.inference_seconds = make.histogram(
            "kvrail_request_inference_seconds", "Time from the begin of prefill to the last token.", buckets.PHASE
        )
        self.time_to_first_token = make.histogram(
            "kvrail_time_to_first_token_seconds", "Time from request to first token.", buckets.FIRST_TOKEN
        )
        self._times_to_token = make.histogram_family(
            "kvrail_time_to_token_seconds",
            "Time from request to a choice's k-th token: verified, or shown to a client that asks for drafts.",
            buckets.TIME_TO_TOKEN,
            *("k", "kind"),
        )
        self.expect_tokens("verified")
        self.inter_token = make.histogram(
            "kvrail_inter_token_seconds", "Time between two tokens of one sequence.", buckets.TOKEN
        )
        self.time_per_token = make.histogram(
            "kvrail_request_time_per_token_seconds",
            "Mean time between the tokens of a choice; 0 where it has one.",
            buckets.TOKEN,
        )

    def _measure_tokens(self, make: Make) -> None:
        """What is counted of a request's tokens."""
        self.request_prompt_tokens = make.histogram(
            "kvrail_request_prompt_tokens", "Prompt tokens of a request.", buckets.TOKENS
        )
        self.request_generation_tokens = make.histogram(
            "kvrail_request_generation_tokens", "Generated tokens of a request, over all its sequences.", buckets.TOKENS
        )
        self.longest_generation_tokens = make.histogram(
            "kvrail_request_longest_generation_tokens",
            "Generated tokens of a request's longest choice.",
            buckets.TOKENS,
        )
        self.request_sequences = make.histogram(
            "kvrail_request_sequences", "Sequences that a request asks for of each prompt: n.", buckets.SEQUENCES
        )
        self.request_max_tokens = make.histogram(
            "kvrail_request_max_tokens", "Most tokens that a request lets a sequence have.", buckets.TOKENS
        )
        self.prompt_tokens = make.counter("kvrail_prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = make.counter("kvrail_cached_prompt_tokens", "Prompt tokens whose KV was held already.")
        self.prompt_tokens_by_source = make.counters(
            "kvrail_prompt_tokens_by_source",
            "Prompt tokens of answered requests by the source of their KV: computed or cached by the decode worker,"
            " or transferred from a prefill worker.",
            "source",
            SOURCES,
        )
        self.generation_tokens = make.counter("kvrail_generation_tokens", "Generated tokens that reached the router.")

    def _measure_scheduling(self, make: Make) -> None:
        """What is measured of the queue in front of the workers, and of the placement."""
        self.queue_length = make.gauge("kvrail_queue_prompts", "Prompts that wait in the router for their turn.")
        self.queue_clients = make.gauge("kvrail_queue_clients", "Clients, by API key or address, whose prompts wait.")
        self.queue_place = make.histogram(
            "kvrail_queue_place",
            "Prompts that were waiting when one arrived; fair turns may overtake them.",
            buckets.POWERS,
        )
        self.queue_seconds = make.histogram(
            "kvrail_queue_seconds", "Time that a prompt waited in the router for its turn.", buckets.PART
        )
        self._placements = make.counter_family(
            "kvrail_placements",
            "Prompts placed on workers, by the reason for the choice and by the form of the worker's KV pages.",
            *("role", "reason", "kv_cache"),
        )
        self._ways = make.counter_family(
            "kvrail_prompt_ways",
            "Prompts computed where they decode (here) or on another worker (apart), where workers do both, and why.",
            *("way", "reason"),
        )
        self.prefix_tokens = make.counters(
            "kvrail_prefix_tokens",
            "Tokens of prompts that decode workers were expected to hold, and that they found.",
            "kind",
            ("expected", "found"),
        )

    def _measure_workers(self, make: Make) -> None:
        """What the router knows of its workers."""
        about = ("role", "worker")
        self._up = make.gauge_family(
            "kvrail_worker_up", "Whether a worker answers, fits this model and is not draining.", *about
        )
        self._states = make.gauge_family(
            "kvrail_worker_state", "1 for the state that a worker is in, 0 for the others.", *about, "state"
        )
        self._given = make.counter_family(
            "kvrail_worker_requests", "Prompts that this router gave to a worker.", *about
        )
        self._held = make.gauge_family(
            "kvrail_worker_requests_in_flight", "Prompts from this router that a worker has.", *about
        )
        self._backlogs = make.gauge_family(
            "kvrail_worker_backlog_tokens", "Tokens of these prompts that the worker still has to compute.", *about
        )
        self._targets = make.gauge_family(
            "kvrail_worker_target",
            "A worker's name and the host and port of its metrics, which are `instance` in Prometheus; always 1.",
            *about,
            "target",
        )
        self._known: dict[tuple[str, str], tuple[Collection[str], str]] = {}
        self.cluster_waiting = make.gauge(
            "kvrail_cluster_requests_waiting",
            "Prompts that wait in the router, and sequences that wait in decode workers, as these said last.",
        )
        self.cluster_running = make.gauge(
            "kvrail_cluster_requests_running", "Sequences that run in decode workers, as these said last."
        )
        self.cluster_kv_usage = make.gauge(
            "kvrail_cluster_kv_usage_ratio", "Share of all decode workers' KV pages that are in use; 1 is all."
        )
        self.cluster_prefix_queried = make.counter(
            "kvrail_cluster_prefix_cache_queried_tokens",
            "Prompt tokens that decode workers have looked up in their prefix caches since the router began.",
        )
        self.cluster_prefix_hit = make.counter(
            "kvrail_cluster_prefix_cache_hit_tokens", "Of these tokens, those that they found."
        )
        self._cluster_cache = make.gauge_family(
            "kvrail_cluster_cache_info",
            "Tokens of a KV page and pages of all decode workers, under vLLM's names; the value is always 1.",
            *("block_size", "num_gpu_blocks"),
        )
        self._cluster_size = (0, 0)

    def _measure_http(self, make: Make) -> None:
        """What is measured of HTTP, whatever is asked for."""
        self._http = make.counter_family(
            "kvrail_http_requests",
            "HTTP requests by route and status; 499: the client left before an answer began.",
            *("handler", "method", "status"),
        )
        self._http_seconds = make.histogram_family(
            "kvrail_http_request_seconds",
            "Time from an HTTP request's head to its answer's end.",
            buckets.HTTP,
            "handler",
        )

    def expect_tokens(self, kind: str) -> None:
        """Show the series of kvrail_time_to_token_seconds that count such tokens; those of `verified` always are."""
        for k in COUNTED_TOKENS:
            self.time_to_token(k, kind)

    def time_to_token(self, k: int, kind: str) -> Histogram:
        """Times of a choice's k-th token, k of COUNTED_TOKENS; kind: verified or provisional."""
        return self._times_to_token.labels(self._model, k, kind)

    def answered(self, handler: str, method: str, status: int, seconds: float | None = None) -> None:
        """Count an HTTP request. seconds: None if its connection refused it, which takes no time."""
        self._http.labels(self._model, handler, method, status).inc()
        if seconds is not None:
            self._http_seconds.labels(self._model, handler).observe(seconds)

    def placed(self, part: str, role: str, worker: str, reason: str, kv_cache: str) -> None:
        """Count a prompt that a worker of this role got. part: prefill or decode. kv_cache: the form of its pages."""
        self._placements.labels(self._model, part, reason, kv_cache).inc()
        self._given.labels(self._model, role, worker).inc()

    def went(self, way: str, reason: str) -> None:
        """Count a prompt that workers of both roles could have computed here or apart."""
        self._ways.labels(self._model, way, reason).inc()

    def worker_up(self, role: str, worker: str, up: bool) -> None:
        """Record whether requests can be sent to `worker`."""
        self._up.labels(self._model, role, worker).set(up)

    def show_worker(
        self,
        role: str,
        worker: str,
        *,
        state: str,
        states: Collection[str],
        requests: int,
        backlog: int,
        target: str = "",
    ) -> None:
        """Record what the router knows of a worker.

        state: one of `states`. backlog: in tokens. target: host and port of its metrics; empty: as it was last.
        """
        about = (self._model, role, worker)
        for each in states:
            self._states.labels(*about, each).set(each == state)
        self._given.labels(*about)
        self._held.labels(*about).set(requests)
        self._backlogs.labels(*about).set(backlog)
        _, before = self._known.get((role, worker), ((), ""))
        if before and target and target != before:
            self._targets.remove(*about, before)
        if target:
            self._targets.labels(*about, target).set(1)
        self._known[role, worker] = states, target or before

    def worker_gone(self, role: str, worker: str) -> None:
        """Show `worker` no more."""
        about = (self._model, role, worker)
        for family in (self._up, self._given, self._held, self._backlogs):
            family.remove(*about)
        states, target = self._known.pop((role, worker), ((), ""))
        for state in states:
            self._states.remove(*about, state)
        self._targets.remove(*about, target)

    def show_cache(self, page_size: int, pages: int) -> None:
        """Record the size of the decode workers' KV caches together. page_size: tokens of a page. pages: 0: unknown."""
        if self._cluster_size != (page_size, pages):
            self._cluster_cache.remove(self._model, *self._cluster_size)
            if pages:
                self._cluster_cache.labels(self._model, page_size, pages).set(1)
            self._cluster_size = (page_size, pages)
