"""The boards of processes: workers, and the router."""

from collections.abc import Callable

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.parts import STATES, Panel, bars, board, heat, lines, number, rows, states
from deploy.grafana.source.queries import (
    CALLS,
    MODEL,
    TOKEN_RATE,
    WORKER,
    WORKER_NAME,
    Query,
    mean,
    named,
    quantile,
    quantiles,
    rate,
    series,
    share,
    split,
    total,
)

STATE = " + ".join(
    f'{place} * sum by (role, worker) (kvrail_worker_state{{{MODEL}, state="{state}"}})'
    for place, state in enumerate(STATES, 1)
)
"""The number of each worker's state, as parts.states shows it."""
INSTANCE = "instance"


def _of_processes(name: str, ours: str, *, rises: bool = False) -> str:
    """A series of processes that have the series `ours`: `process_*` carries no model."""
    value = f"rate({name}[$__rate_interval])" if rises else name
    return f"sum by (instance) ({value}\n  and on (instance, job) {ours})"


def _chosen(expr: str, part: str = "") -> Query:
    """A line for each worker that the board's variable names. part: of the worker's name."""
    return Query(named(expr, chosen=True), WORKER_NAME + part)


def _load() -> list[Panel]:
    return [
        states("State", "As the router sees it.", Query(STATE, WORKER_NAME)),
        lines(
            "Sequences that run",
            "On each worker.",
            "count:sequences",
            _chosen(total("kvrail_engine_sequences", 'state="running"', by=INSTANCE)),
        ),
        lines(
            "Sequences that wait",
            "In each worker's own queue; most wait at the router.",
            "count:sequences",
            _chosen(total("kvrail_engine_sequences", 'state="waiting"', by=INSTANCE)),
        ),
        lines(
            "Prompts given by the router",
            "To each worker.",
            "reqps",
            Query(rate("kvrail_worker_requests_total", WORKER, by="role, worker"), WORKER_NAME),
        ),
        lines(
            "Tokens computed",
            "Prompt tokens.",
            TOKEN_RATE,
            _chosen(rate("kvrail_engine_prompt_tokens_total", by=INSTANCE)),
        ),
        lines(
            "Tokens sampled",
            "Output tokens.",
            TOKEN_RATE,
            _chosen(rate("kvrail_engine_generation_tokens_total", by=INSTANCE)),
        ),
        lines(
            "Backlog",
            "Tokens of prompts that a worker has still to compute for this router.",
            "count:tokens",
            Query(total("kvrail_worker_backlog_tokens", WORKER, by="role, worker"), WORKER_NAME),
        ),
    ]


def _steps() -> list[Panel]:
    return [
        lines(
            "Time of a step",
            "Median and 99th percentile by worker.",
            "s",
            _chosen(quantile(0.5, "kvrail_engine_step_seconds", by=INSTANCE), ", median"),
            _chosen(quantile(0.99, "kvrail_engine_step_seconds", by=INSTANCE), ", p99"),
        ),
        lines(
            "Tokens of a step",
            "Mean by worker.",
            "count:tokens",
            _chosen(mean("kvrail_engine_step_tokens", by=INSTANCE)),
        ),
        lines(
            "Preemptions",
            "Sequences that gave up their pages to others.",
            "ops",
            _chosen(rate("kvrail_engine_preemptions_total", by=INSTANCE)),
        ),
    ]


def _memory() -> list[Panel]:
    pages = named(total("kvrail_engine_pages", by="instance, state"), chosen=True)
    hits = share(
        rate("kvrail_engine_prefix_cache_hit_tokens_total", by=INSTANCE),
        rate("kvrail_engine_prefix_cache_queried_tokens_total", by=INSTANCE),
    )
    return [
        lines(
            "KV pages",
            "By state, over the chosen workers.",
            "count:pages",
            Query(f"sum by (state) ({pages})", "{{state}}"),
            stacked=True,
        ),
        lines(
            "KV pages in use",
            "Share of a worker's pages that running sequences hold.",
            "percentunit",
            _chosen(
                share(
                    total("kvrail_engine_pages", 'state="used"', by=INSTANCE), total("kvrail_engine_pages", by=INSTANCE)
                )
            ),
            top=1,
        ),
        lines("Prefix cache", "Share of prompt tokens that the cache held.", "percentunit", _chosen(hits), top=1),
    ]


def _start() -> list[Panel]:
    phases = total("kvrail_worker_start_seconds", by="instance, phase")
    compiled = total("kvrail_codec_compile_seconds", by="instance, codec")
    memory = named(total("kvrail_worker_memory_bytes", by="instance, use"), chosen=True)
    return [
        bars(
            "Start-up by worker",
            "Time of the last start, or of this one so far, at the five slowest.",
            "s",
            Query(f"topk(5, {named(total('kvrail_worker_start_seconds', by=INSTANCE), chosen=True)})", WORKER_NAME),
            width=12,
        ),
        bars(
            "Start-up by phase",
            "What each phase took at the worker where it took longest.",
            "s",
            Query(f"max by (phase) ({named(phases, chosen=True)}) > 0.01", "{{phase}}"),
            width=12,
        ),
        bars(
            "Codecs compiled",
            "Time until the kernels were compiled or loaded, at the worker where it took longest.",
            "s",
            Query(f"max by (codec) ({named(compiled, chosen=True)})", "{{codec}}"),
            width=12,
        ),
        lines(
            "GPU memory",
            "By use, over the chosen workers.",
            "bytes",
            Query(f"sum by (use) ({memory})", "{{use}}"),
            stacked=True,
            width=12,
        ),
    ]


def _processes(ours: str, shown: Callable[[str], Query], cores: str, memory: str, files: str) -> list[Panel]:
    """What processes take.

    ours: a series that only these have. shown: makes a query of an expression by instance. The others: descriptions.
    """
    return [
        lines("Processor", cores, "count:cores", shown(_of_processes("process_cpu_seconds_total", ours, rises=True))),
        lines("Memory", memory, "decbytes", shown(_of_processes("process_resident_memory_bytes", ours))),
        lines("Open files", files, "count:files", shown(_of_processes("process_open_fds", ours))),
    ]


def _worker_processes() -> list[Panel]:
    pages = series("kvrail_engine_pages")
    about = rows(
        "Devices",
        "Role, device, types and libraries of each worker.",
        Query(series("kvrail_worker_info"), "{{role}} {{instance}}"),
    )
    builds = rows("Builds", "Version and protocol of each process.", Query("kvrail_build_info", "{{instance}}"))
    taken = _processes(pages, _chosen, "Cores in use.", "Resident memory of the host.", "Open file descriptors.")
    return [*taken, about, builds]


def workers() -> Dashboard:
    """What each worker does and holds."""
    sections = {"Load": _load(), "Steps": _steps(), "KV pages": _memory(), "Processes": _worker_processes()}
    sections["Start and memory"] = _start()
    description = "What each worker does and holds."
    return board("kvrail-workers", "workers", description, sections, of_workers=True)


def _door() -> list[Panel]:
    return [
        lines(
            "HTTP by path",
            "Answers of each path, without probes, scrapes and the status page.",
            "reqps",
            split(rate, "kvrail_http_requests_total", CALLS, by="handler"),
            stacked=True,
        ),
        lines(
            "HTTP by status",
            "Answers by status, without probes, scrapes and the status page; 499: the client left first.",
            "reqps",
            split(rate, "kvrail_http_requests_total", CALLS, by="status"),
            stacked=True,
        ),
        lines(
            "Time of an answer, p99",
            "From request to last byte, streams included.",
            "s",
            Query(quantile(0.99, "kvrail_http_request_seconds", CALLS, by="handler"), "{{handler}}"),
        ),
    ]


def _queue() -> list[Panel]:
    return [
        number(
            "Prompts that wait",
            "In the router, for their turn.",
            "count:prompts",
            total("kvrail_queue_prompts"),
            width=6,
            steps=((None, "green"), (32, "orange"), (256, "red")),
        ),
        number("Clients that wait", "By API key or address.", "count:clients", total("kvrail_queue_clients"), width=6),
        number(
            "Failovers",
            "Streams that another decode worker took over, per second.",
            "ops",
            rate("kvrail_failovers_total"),
            width=6,
            steps=((None, "green"), (0.001, "orange")),
        ),
        number("Requests at once", "Admitted requests.", "count:requests", total("kvrail_requests_in_flight"), width=6),
        lines(
            "Time in the queue",
            "Until a prompt has its turn and a worker has room.",
            "s",
            *quantiles("kvrail_queue_seconds"),
        ),
        lines(
            "Queue",
            "Prompts that wait, and clients whose prompts wait.",
            "count:waiting",
            Query(total("kvrail_queue_prompts"), "prompts"),
            Query(total("kvrail_queue_clients"), "clients"),
        ),
        heat(
            "Place in the queue",
            "Prompts that waited already when one came.",
            "count:prompts",
            split(rate, "kvrail_queue_place_bucket", by="le"),
        ),
    ]


def _placing() -> list[Panel]:
    return [
        lines(
            "Placements by reason",
            "What decided between workers.",
            "ops",
            split(rate, "kvrail_placements_total", by="role, reason"),
            width=12,
        ),
        lines(
            "Ways of prompts by reason",
            "Computed where they decode (here) or on another worker (apart), where workers do both, and why.",
            "ops",
            split(rate, "kvrail_prompt_ways_total", by="way, reason"),
            width=12,
        ),
        lines(
            "Prefix tokens",
            "That decode workers were expected to hold, and that they found.",
            TOKEN_RATE,
            split(rate, "kvrail_prefix_tokens_total", by="kind"),
            width=12,
        ),
        bars(
            "Requests at workers",
            "Of this router, by worker, now.",
            "count:requests",
            Query(total("kvrail_worker_requests_in_flight", by="role, worker"), WORKER_NAME),
            width=12,
        ),
    ]


def _router_process() -> list[Panel]:
    return _processes(
        series("kvrail_queue_prompts"),
        lambda expr: Query(expr, "router {{instance}}"),
        "Cores in use. The router has one loop: near 1 it is what limits.",
        "Resident memory.",
        "Descriptors; each client's connection is one.",
    )


def router() -> Dashboard:
    """The door, the queue, and how requests are placed."""
    sections = {"Door": _door(), "Queue": _queue(), "Placing": _placing(), "Process": _router_process()}
    return board("kvrail-router", "router", "The door, the queue, and how requests are placed.", sections)
