"""Every metric's name, and the few objects through which processes record them; kvrail/exposition.py shows them.

Router and workers both say how many requests run and wait: aggregate them by job, not over all.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrail.lifecycle import PARTS
from kvrail.tally import TallyCounter, TallyHistogram

REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""Buckets from a short local answer to the default deadline."""
FIRST_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
"""Buckets from a cached prompt on a fast GPU to a long prompt on a busy one."""
TOKEN_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)
"""Buckets of one decode step; fine around the 10 to 50 ms that readers notice."""
PART_SECONDS = (
    0.0001,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    300.0,
)
"""Buckets of parts of a request, which may be far shorter than a token."""
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Buckets of a share."""
TOKENS = tuple(float(1 << power) for power in range(0, 18))
"""Buckets of token counts: powers of two up to 131072."""

DRAFTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Buckets of accepted drafts, up to the default most that a sequence makes."""

COUNTED_TOKENS = (1, 2, 8, 32, 64)
"""Tokens of a choice whose time is measured."""

OUTCOMES = ("stop", "length", "cancelled", "invalid", "overloaded", "unavailable", "deadline", "error")
"""How a request can end at the router; the first two are successes."""
PHASES = ("queue", "prefill", "decode")
DIRECTIONS = ("sent", "received")
PAGE_STATES = ("free", "used", "cached")


class _Family:
    """Makes metrics of one registry that carry the model's name, and at most one label more."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model = model_name

    def counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, ["model_name"], registry=self._registry).labels(self._model)

    def gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, ["model_name"], registry=self._registry).labels(self._model)

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, documentation, ["model_name"], registry=self._registry, buckets=buckets)
        return family.labels(self._model)

    def tally(self, name: str, documentation: str) -> TallyCounter:
        return TallyCounter(name, documentation, self._model, self._registry)

    def tally_histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> TallyHistogram:
        return TallyHistogram(name, documentation, self._model, buckets, self._registry)

    def counters(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = Counter(name, documentation, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def gauges(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        family = Gauge(name, documentation, ["model_name", label], registry=self._registry)
        return {value: family.labels(self._model, value) for value in values}

    def histograms(self, name: str, documentation: str, label: str, values: Iterable[str]) -> dict[str, Histogram]:
        labels = ["model_name", label]
        family = Histogram(name, documentation, labels, registry=self._registry, buckets=PART_SECONDS)
        return {value: family.labels(self._model, value) for value in values}


class RouterMetrics:
    """What the router measures of each request."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model = model_name
        make = _Family(registry, model_name)
        self.outcomes = make.counters("kvrail_requests", "Requests by how they ended.", "outcome", OUTCOMES)
        in_flight = make.gauges(
            "kvrail_requests_in_flight",
            "Admitted requests: waiting for their first token, or running.",
            "state",
            ("waiting", "running"),
        )
        self.waiting, self.running = in_flight["waiting"], in_flight["running"]
        self.request_seconds = make.histogram(
            "kvrail_request_seconds", "Time from request to last byte.", REQUEST_SECONDS
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
        )
        self.time_to_first_token = make.histogram(
            "kvrail_time_to_first_token_seconds", "Time from request to first token.", FIRST_TOKEN_SECONDS
        )
        times = Histogram(
            "kvrail_time_to_token_seconds",
            "Time from request to a choice's k-th token: verified, or shown to a client that asks for drafts.",
            ["model_name", "k", "kind"],
            registry=registry,
            buckets=FIRST_TOKEN_SECONDS,
        )
        self.time_to_token = {
            (k, kind): times.labels(model_name, k, kind) for k in COUNTED_TOKENS for kind in ("verified", "provisional")
        }
        self.inter_token = make.tally_histogram(
            "kvrail_inter_token_seconds", "Time between two tokens of one sequence.", TOKEN_SECONDS
        )
        self.request_prompt_tokens = make.histogram(
            "kvrail_request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_generation_tokens = make.histogram(
            "kvrail_request_generation_tokens", "Generated tokens of a request, over all its sequences.", TOKENS
        )
        self.prompt_tokens = make.counter("kvrail_prompt_tokens", "Prompt tokens of answered requests.")
        self.cached_tokens = make.counter("kvrail_cached_prompt_tokens", "Prompt tokens whose KV was held already.")
        self.generation_tokens = make.tally("kvrail_generation_tokens", "Generated tokens that reached the router.")
        self.failovers = make.counter("kvrail_failovers", "Streams that another decode worker took over.")
        self._measure_scheduling(registry, make)
        self._workers = Gauge(
            "kvrail_worker_up",
            "Whether a worker answers, fits this model and is not draining.",
            ["model_name", "role", "worker"],
            registry=registry,
        )

    def _measure_scheduling(self, registry: CollectorRegistry, make: _Family) -> None:
        """What is measured of the queue in front of the workers, and of who gets what."""
        self.queue_length = make.gauge("kvrail_queue_prompts", "Prompts that wait in the router for their turn.")
        self.queue_clients = make.gauge("kvrail_queue_clients", "Clients, by API key or address, whose prompts wait.")
        self.queue_place = make.histogram(
            "kvrail_queue_place", "Prompts that waited already when one came; fair turns may overtake them.", TOKENS
        )
        self.queue_seconds = make.histogram(
            "kvrail_queue_seconds", "Time that a prompt waited in the router for its turn.", PART_SECONDS
        )
        self._placements = Counter(
            "kvrail_placements",
            "Prompts given to workers, by what decided between them.",
            ["model_name", "role", "reason"],
            registry=registry,
        )
        self.prefix_tokens = make.counters(
            "kvrail_prefix_tokens",
            "Tokens of prompts that decode workers were expected to hold, and that they found.",
            "kind",
            ("expected", "found"),
        )

    def placed(self, role: str, reason: str) -> None:
        """Count a prompt that a worker got."""
        self._placements.labels(self._model, role, reason).inc()

    def worker_up(self, role: str, worker: str, up: bool) -> None:
        """Record whether requests can be sent to `worker`."""
        self._workers.labels(self._model, role, worker).set(float(up))

    def worker_gone(self, role: str, worker: str) -> None:
        """Show `worker` no more."""
        self._workers.remove(self._model, role, worker)


class EngineMetrics:
    """What an engine measures of its steps and pages."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        make = _Family(registry, model_name)
        sequences = make.gauges(
            "kvrail_engine_sequences", "Sequences that run or wait.", "state", ("running", "waiting")
        )
        self.running, self.waiting = sequences["running"], sequences["waiting"]
        self.pages = make.gauges("kvrail_engine_pages", "KV pages by state.", "state", PAGE_STATES)
        self.preemptions = make.counter("kvrail_engine_preemptions", "Sequences that gave up their pages to others.")
        self.prefix_queried_tokens = make.counter(
            "kvrail_engine_prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit_tokens = make.counter(
            "kvrail_engine_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.prompt_tokens = make.counter("kvrail_engine_prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = make.counter("kvrail_engine_generation_tokens", "Tokens sampled.")
        self.drafts_proposed = make.counter(
            "kvrail_engine_drafts_proposed", "Tokens drafted on coarse KV and then verified."
        )
        self.drafts_accepted = make.counter(
            "kvrail_engine_drafts_accepted", "Drafts that their verification on exact KV repeated."
        )
        self.accepted_drafts = make.histogram(
            "kvrail_engine_accepted_drafts", "Drafts accepted in one verification: how far drafts stay right.", DRAFTS
        )
        self.step_seconds = make.histogram("kvrail_engine_step_seconds", "Time of one engine step.", TOKEN_SECONDS)
        self.step_tokens = make.histogram("kvrail_engine_step_tokens", "Tokens computed in one engine step.", TOKENS)

    def set_load(self, running: int, waiting: int) -> None:
        """Record the sequences that run and wait."""
        self.running.set(running)
        self.waiting.set(waiting)

    def set_pages(self, *, free: int, used: int, cached: int) -> None:
        """Record the pages in each state; the three add up to the pool."""
        for state, count in zip(PAGE_STATES, (free, used, cached), strict=True):
            self.pages[state].set(count)


class TransferMetrics:
    """What a worker measures of KV that leaves or reaches it.

    `codecs` are those whose series exist before their first transfer.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, codecs: Iterable[str] = ("raw",)) -> None:
        self._model = model_name
        make = _Family(registry, model_name)
        labels = ["model_name", "direction", "codec"]
        self._raw = Counter(
            "kvrail_kv_raw_bytes", "KV bytes transferred, as they were before encoding.", labels, registry=registry
        )
        self._payload = Counter(
            "kvrail_kv_payload_bytes", "KV bytes transferred, as they crossed the wire.", labels, registry=registry
        )
        self._frames = Counter("kvrail_kv_frames", "KV frames transferred.", labels, registry=registry)
        self.seconds = make.histograms(
            "kvrail_kv_transfer_seconds", "Time from a transfer's first frame to its last.", "direction", DIRECTIONS
        )
        self.exposed_seconds = make.histogram(
            "kvrail_kv_exposed_transfer_seconds",
            "Time from the end of a prompt's computation to its exact KV at the decode worker: what nothing hid.",
            PART_SECONDS,
        )
        transfers = Counter(
            "kvrail_kv_transfers",
            "Transfers by how they ended: committed, aborted by an end on purpose, or failed.",
            ["model_name", "direction", "outcome"],
            registry=registry,
        )
        self.transfers = {
            (way, outcome): transfers.labels(model_name, way, outcome)
            for way in DIRECTIONS
            for outcome in ("committed", "aborted", "failed")
        }
        self.held_bytes = make.gauge(
            "kvrail_kv_held_bytes", "Bytes of later stages that wait in memory until first stages have left."
        )
        self.kept_bytes = make.gauge("kvrail_kv_kept_bytes", "Bytes of earlier stages kept until the last has come.")
        self.lossy_requests = make.counter(
            "kvrail_lossy_requests", "Requests whose KV came through a codec that does not restore every bit."
        )
        self.hidden_share = make.histogram(
            "kvrail_kv_wait_hidden_share",
            "Of the time from a request's first token to its exact KV, the share during which drafts were made.",
            SHARES,
        )
        self.fallbacks = make.counters(
            "kvrail_prefill_fallbacks",
            "Prefills that went to an alternate worker, to the decode worker itself, or to nobody.",
            "reason",
            ("alternate", "local", "refused"),
        )
        self._measure_choices(registry)
        for codec in codecs:
            for way in DIRECTIONS:
                self._count(way, codec, 0, 0, 0)

    def _measure_choices(self, registry: CollectorRegistry) -> None:
        """What is measured of links, and of codecs that were left to the decode worker."""
        self._choices = Counter(
            "kvrail_kv_codec_choices",
            "Transfers whose codec was left to the decode worker, by what it took and why.",
            ["model_name", "codec", "reason"],
            registry=registry,
        )
        self._links = Gauge(
            "kvrail_kv_link_bytes_per_second",
            "Running mean of what the link from a prefill worker carries.",
            ["model_name", "prefill_worker"],
            registry=registry,
        )

    def sent(self, codec: str, *, raw_bytes: int, payload_bytes: int, frames: int = 1) -> None:
        """Count frames that left, with their KV's size before encoding."""
        self._count("sent", codec, raw_bytes, payload_bytes, frames)

    def received(self, codec: str, *, raw_bytes: int, payload_bytes: int, frames: int = 1) -> None:
        """Count frames that came, with their KV's size after decoding."""
        self._count("received", codec, raw_bytes, payload_bytes, frames)

    def codec_chosen(self, codec: str, reason: str) -> None:
        """Count a transfer whose codec was left to the decode worker."""
        self._choices.labels(self._model, codec, reason).inc()

    def link_measured(self, prefill_worker: str, bytes_per_second: float) -> None:
        """Record what the link from `prefill_worker` carries."""
        self._links.labels(self._model, prefill_worker).set(bytes_per_second)

    def _count(self, way: str, codec: str, raw_bytes: int, payload_bytes: int, frames: int) -> None:
        self._raw.labels(self._model, way, codec).inc(raw_bytes)
        self._payload.labels(self._model, way, codec).inc(payload_bytes)
        self._frames.labels(self._model, way, codec).inc(frames)


class CodecMetrics:
    """What a worker measures of encoding and decoding, by codec; every series of `codecs` exists at once.

    Encoded values, escapes and raw tensors are counted where KV is encoded: on prefill workers.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, codecs: Sequence[str]) -> None:
        make = _Family(registry, model_name)
        self._encode_seconds = make.histograms(
            "kvrail_kv_encode_seconds",
            "Time from the launch of a frame's encoding to its bytes on the host; on a GPU, waits for it included.",
            "codec",
            codecs,
        )
        self._decode_seconds = make.histograms(
            "kvrail_kv_decode_seconds",
            "Time that decoding a frame took a thread; on a GPU, kernels go on behind it.",
            "codec",
            codecs,
        )
        self._values = make.counters("kvrail_kv_encoded_values", "Elements of keys and values.", "codec", codecs)
        self._escapes = make.counters(
            "kvrail_kv_escaped_values", "Elements of keys and values that no code covered.", "codec", codecs
        )
        self._raw_tensors = make.counters(
            "kvrail_kv_raw_tensors",
            "Of each frame's keys and values, those that travelled as they were: no code would have made them smaller.",
            "codec",
            codecs,
        )

    def encoded(self, codec: str, seconds: float, *, values: int, escapes: int, raw_tensors: int) -> None:
        """Count one block that was encoded."""
        self._encode_seconds[codec].observe(seconds)
        self._values[codec].inc(values)
        self._escapes[codec].inc(escapes)
        self._raw_tensors[codec].inc(raw_tensors)

    def decoded(self, codec: str, seconds: float) -> None:
        """Count one frame that was decoded."""
        self._decode_seconds[codec].observe(seconds)
