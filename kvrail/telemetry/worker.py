"""What a prefill or a decode worker measures: its engine, and the KV that leaves or reaches it."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from kvrail.telemetry import buckets
from kvrail.telemetry.making import Make
from kvrail.telemetry.series import Gauge

DIRECTIONS = ("sent", "received")
PAGE_STATES = ("free", "used", "cached")
MEMORY_USES = ("weights", "kv_cache", "other", "free")


class EngineMetrics:
    """What an engine measures of its steps and pages.

    receives: whether KV comes to it from elsewhere, so that it can wait for it. drafts: whether it can draft.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, *, receives: bool = True, drafts: bool = True
    ) -> None:
        make = self._make = Make(registry, model_name)
        sequences = make.gauges(
            "kvrail_engine_sequences", "Sequences that run or wait.", "state", ("running", "waiting")
        )
        self.running, self.waiting = sequences["running"], sequences["waiting"]
        self.receiving: Gauge | None = None
        if receives:
            self.receiving = make.gauge(
                "kvrail_engine_receiving_sequences", "Running sequences that only wait for their KV."
            )
        self.pages = make.gauges("kvrail_engine_pages", "KV pages by state.", "state", PAGE_STATES)
        self.closed_pages = make.gauge("kvrail_engine_closed_pages", "KV pages in lossless or a lossy form.")
        self.stuck_pages = make.gauge(
            "kvrail_engine_stuck_pages",
            "Full KV pages that stay plain: no spare unit, or values beyond a lossy form.",
        )
        self.raw_tiles = make.gauge(
            "kvrail_engine_raw_tiles_ratio", "Share of closed pages' tiles that take a spare unit; 1 is all."
        )
        self.preemptions = make.counter("kvrail_engine_preemptions", "Sequences that gave up their pages to others.")
        self.sequence_preemptions = make.histogram(
            "kvrail_engine_sequence_preemptions",
            "Times that a sequence gave up its pages to others.",
            buckets.PREEMPTIONS,
        )
        self.prefix_queried_tokens = make.counter(
            "kvrail_engine_prefix_cache_queried_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hit_tokens = make.counter(
            "kvrail_engine_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache."
        )
        self.prompt_tokens = make.counter("kvrail_engine_prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = make.counter("kvrail_engine_generation_tokens", "Tokens sampled.")
        self.step_seconds = make.histogram("kvrail_engine_step_seconds", "Time of one engine step.", buckets.STEP)
        self.step_tokens = make.histogram(
            "kvrail_engine_step_tokens", "Tokens computed in one engine step.", buckets.POWERS
        )
        if drafts:
            self._measure_drafts(make)

    def _measure_drafts(self, make: Make) -> None:
        self.drafts_proposed = make.counter(
            "kvrail_engine_drafts_proposed", "Tokens drafted on coarse KV and then verified."
        )
        self.drafts_accepted = make.counter(
            "kvrail_engine_drafts_accepted", "Drafts that their verification on exact KV repeated."
        )
        self.accepted_drafts = make.histogram(
            "kvrail_engine_accepted_drafts",
            "Drafts accepted in one verification: how far drafts stay right.",
            buckets.DRAFTS,
        )

    def show_cache(self, *, page_size: int, pages: int, kv_dtype: str, prefix_cache: bool, cache_bytes: int) -> None:
        """Record what the KV cache is; once. cache_bytes: its memory."""
        self._make.gauge("kvrail_engine_cache_bytes", "Memory of the KV cache.").set(cache_bytes)
        self._make.gauge("kvrail_engine_cache_tokens", "Tokens that fit into the KV cache.").set(pages * page_size)
        family = self._make.gauge_family(
            "kvrail_engine_cache_info",
            "The KV cache: tokens of a page, pages, their elements' type; the value is always 1.",
            *("page_size", "pages", "kv_dtype", "prefix_cache"),
        )
        family.labels(self._make.model_name, page_size, pages, kv_dtype, prefix_cache).set(1)

    def set_load(self, running: int, waiting: int, receiving: int = 0) -> None:
        """Record the sequences that run and wait. receiving: of those that run, which only wait for their KV."""
        self.running.set(running)
        self.waiting.set(waiting)
        if self.receiving is not None:
            self.receiving.set(receiving)

    def set_pages(self, *, free: int, used: int, cached: int) -> None:
        """Record the pages in each state; the three add up to the pool."""
        for state, count in zip(PAGE_STATES, (free, used, cached), strict=True):
            self.pages[state].set(count)


class MemoryMetrics:
    """What takes a GPU's memory. weights, kv_cache: bytes of both, which do not change."""

    def __init__(self, registry: CollectorRegistry, model_name: str, *, weights: int, kv_cache: int) -> None:
        self._bytes = Make(registry, model_name).gauges(
            "kvrail_worker_memory_bytes",
            "The GPU's memory by use; other: captured steps, buffers, libraries, other processes.",
            "use",
            MEMORY_USES,
        )
        self._bytes["weights"].set(weights)
        self._bytes["kv_cache"].set(kv_cache)

    def show(self, *, free: int, total: int) -> None:
        """Record what is free of the GPU's memory, in bytes."""
        self._bytes["free"].set(free)
        known = self._bytes["weights"].value + self._bytes["kv_cache"].value
        self._bytes["other"].set(max(0, total - free - known))


class TransferMetrics:
    """What a worker measures of KV that leaves or reaches it.

    codecs: those whose series exist before their first transfer. directions: in which KV can cross here.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        codecs: Iterable[str] = ("raw",),
        directions: Sequence[str] = DIRECTIONS,
    ) -> None:
        self._model = model_name
        self._directions = directions
        make = Make(registry, model_name)
        labels = ("direction", "codec")
        self._raw = make.counter_family(
            "kvrail_kv_raw_bytes", "KV bytes transferred, as they were before encoding.", *labels
        )
        self._payload = make.counter_family(
            "kvrail_kv_payload_bytes", "KV bytes transferred, as they crossed the wire.", *labels
        )
        self._frames = make.counter_family("kvrail_kv_frames", "KV frames transferred.", *labels)
        self.seconds = make.histograms(
            "kvrail_kv_transfer_seconds", "Time from a transfer's first frame to its last.", "direction", directions
        )
        transfers = make.counter_family(
            "kvrail_kv_transfers",
            "Transfers by how they ended: committed, aborted by an end on purpose, or failed.",
            *("direction", "outcome"),
        )
        self.transfers = {
            (way, outcome): transfers.labels(model_name, way, outcome)
            for way in directions
            for outcome in ("committed", "aborted", "failed")
        }
        if "sent" in directions:
            self.held_bytes = make.gauge(
                "kvrail_kv_held_bytes", "Bytes of later stages that wait in memory until first stages have left."
            )
        if "received" in directions:
            self._measure_receiving(make)
        self.expect(*codecs)

    def _measure_receiving(self, make: Make) -> None:
        """What is measured where KV arrives: what transfers were worth, links, and codecs that were left to choose."""
        self.exposed_seconds = make.histogram(
            "kvrail_kv_exposed_transfer_seconds",
            "Time from the end of a prompt's computation to its exact KV at the decode worker: what nothing hid.",
            buckets.PART,
        )
        self.kept_bytes = make.gauge("kvrail_kv_kept_bytes", "Bytes of earlier stages kept until the last has come.")
        self.lossy_requests = make.counter(
            "kvrail_lossy_requests", "Requests whose KV came through a codec that does not restore every bit."
        )
        self.hidden_share = make.histogram(
            "kvrail_kv_wait_hidden_share",
            "Share of the time from a request's first token to its exact KV in which drafts were made.",
            buckets.SHARES,
        )
        self.fallbacks = make.counters(
            "kvrail_prefill_fallbacks",
            "Prefills that an alternate worker or the decode worker itself computed, and prefills that none did.",
            "reason",
            ("alternate", "local", "refused"),
        )
        self._choices = make.counter_family(
            "kvrail_kv_codec_choices",
            "Transfers whose codec was left to the decode worker, by what it took and why.",
            *("codec", "reason"),
        )
        self._substituted = make.counter_family(
            "kvrail_kv_codec_substituted",
            "Transfers that used another codec because the requested one was not compiled yet.",
            "codec",
        )
        self._links = make.gauge_family(
            "kvrail_kv_link_bytes_per_second",
            "Rate of the link from a prefill worker: median of its last transfers, weighted by bytes and age.",
            "prefill_worker",
        )

    def expect(self, *codecs: str) -> None:
        """Show the series of these codecs from now on; others' come with their first transfer."""
        for codec in codecs:
            for way in self._directions:
                self.crossed(way, codec, raw_bytes=0, payload_bytes=0, frames=0)

    def crossed(self, way: str, codec: str, *, raw_bytes: int, payload_bytes: int, frames: int = 1) -> None:
        """Count frames that were sent or received, one of DIRECTIONS; raw_bytes: of their KV without a code."""
        self._raw.labels(self._model, way, codec).inc(raw_bytes)
        self._payload.labels(self._model, way, codec).inc(payload_bytes)
        self._frames.labels(self._model, way, codec).inc(frames)

    def codec_chosen(self, codec: str, reason: str) -> None:
        """Count a transfer whose codec was left to the decode worker."""
        self._choices.labels(self._model, codec, reason).inc()

    def codec_substituted(self, codec: str) -> None:
        """Count a transfer for which `codec` was asked for, and another one was used."""
        self._substituted.labels(self._model, codec).inc()

    def link_measured(self, prefill_worker: str, bytes_per_second: float) -> None:
        """Record what the link from `prefill_worker` carries."""
        self._links.labels(self._model, prefill_worker).set(bytes_per_second)

    def link_forgotten(self, prefill_worker: str, bytes_per_second: float) -> None:
        """Show the link from `prefill_worker` no more."""
        self._links.remove(self._model, prefill_worker)


class CodecMetrics:
    """What a worker measures of encoding and decoding, by codec. A codec's series come with its first use.

    encodes, decodes: which of both this worker does.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, *, encodes: bool = True, decodes: bool = True
    ) -> None:
        self._model = model_name
        make = Make(registry, model_name)
        self._compiling = make.gauge_family(
            "kvrail_codec_compiling", "1 while a codec that was asked for is being compiled, then 0.", "codec"
        )
        self._compile_seconds = make.gauge_family(
            "kvrail_codec_compile_seconds",
            "Time until a codec's kernels were compiled, or loaded from the cache, in this process.",
            "codec",
        )
        if decodes:
            self._decode_seconds = make.histogram_family(
                "kvrail_kv_decode_seconds",
                "Time that a thread needed to decode a frame; on a GPU, kernels may still run after it.",
                buckets.PART,
                "codec",
            )
        if encodes:
            self._measure_encoding(make)

    def _measure_encoding(self, make: Make) -> None:
        self._encode_seconds = make.histogram_family(
            "kvrail_kv_encode_seconds",
            "Time from the launch of a frame's encoding to its bytes on the host; on a GPU, waits for it included.",
            buckets.PART,
            "codec",
        )
        self._values = make.counter_family("kvrail_kv_encoded_values", "Elements of keys and values.", "codec")
        self._escapes = make.counter_family(
            "kvrail_kv_escaped_values", "Elements of keys and values that no code covered.", "codec"
        )
        self._raw_tensors = make.counter_family(
            "kvrail_kv_raw_tensors",
            "Keys or values of frames that were sent uncompressed, because no code would have made them smaller.",
            "codec",
        )

    def compiling(self, codec: str, under_way: bool) -> None:
        """Record whether a codec that was asked for is being compiled."""
        self._compiling.labels(self._model, codec).set(under_way)

    def compiled(self, codec: str, seconds: float) -> None:
        """Record how long a codec took to be compiled or loaded."""
        self._compile_seconds.labels(self._model, codec).set(seconds)

    def encoded(self, codec: str, seconds: float, *, values: int, escapes: int, raw_tensors: int) -> None:
        """Count one block that was encoded."""
        self._encode_seconds.labels(self._model, codec).observe(seconds)
        self._values.labels(self._model, codec).inc(values)
        self._escapes.labels(self._model, codec).inc(escapes)
        self._raw_tensors.labels(self._model, codec).inc(raw_tensors)

    def decoded(self, codec: str, seconds: float) -> None:
        """Count one frame that was decoded."""
        self._decode_seconds.labels(self._model, codec).observe(seconds)
