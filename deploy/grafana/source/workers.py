"""The boards of processes: workers, and the router."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.parts import STATES, Panel, bars, board, heat, lines, number, rows, states
from deploy.grafana.source.queries import (
    MODEL,
    WORKER,
    Query,
    mean,
    quantile,
    quantiles,
    rate,
    series,
    share,
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
    return f"{value}\n  and on (instance, job) {ours}"


def _load() -> list[Panel]:
    return [
        states("State", "As the router sees it.", Query(STATE, "{{role}} {{worker}}")),
        lines(
            "Sequences that run",
            "On each worker.",
            "none",
            Query(series("kvrail_engine_sequences", WORKER, 'state="running"'), "{{instance}}"),
            width=8,
        ),
        lines(
            "Sequences that wait",
            "In each worker's own queue; most wait at the router.",
            "none",
            Query(series("kvrail_engine_sequences", WORKER, 'state="waiting"'), "{{instance}}"),
            width=8,
        ),
        lines(
            "Prompts given by the router",
            "To each worker.",
            "reqps",
            Query(rate("kvrail_worker_requests_total", by="role, worker"), "{{role}} {{worker}}"),
            width=8,
        ),
        lines(
            "Tokens computed",
            "Prompt tokens.",
            "none",
            Query(rate("kvrail_engine_prompt_tokens_total", WORKER, by=INSTANCE), "{{instance}}"),
            width=8,
        ),
        lines(
            "Tokens sampled",
            "Output tokens.",
            "none",
            Query(rate("kvrail_engine_generation_tokens_total", WORKER, by=INSTANCE), "{{instance}}"),
            width=8,
        ),
        lines(
            "Backlog",
            "Tokens of prompts that a worker has still to compute for this router.",
            "none",
            Query(total("kvrail_worker_backlog_tokens", by="role, worker"), "{{role}} {{worker}}"),
            width=8,
        ),
    ]


def _steps() -> list[Panel]:
    return [
        lines(
            "Time of a step",
            "Median and 99th percentile by worker.",
            "s",
            Query(quantile(0.5, "kvrail_engine_step_seconds", WORKER, by=INSTANCE), "{{instance}}, median"),
            Query(quantile(0.99, "kvrail_engine_step_seconds", WORKER, by=INSTANCE), "{{instance}}, p99"),
            width=8,
        ),
        lines(
            "Tokens of a step",
            "Mean by worker.",
            "none",
            Query(mean("kvrail_engine_step_tokens", WORKER, by=INSTANCE), "{{instance}}"),
            width=8,
        ),
        lines(
            "Preemptions",
            "Sequences that gave up their pages to others.",
            "ops",
            Query(rate("kvrail_engine_preemptions_total", WORKER, by=INSTANCE), "{{instance}}"),
            width=8,
        ),
    ]


def _memory() -> list[Panel]:
    pages = series("kvrail_engine_pages", WORKER)
    hits = share(
        rate("kvrail_engine_prefix_cache_hit_tokens_total", WORKER, by=INSTANCE),
        rate("kvrail_engine_prefix_cache_queried_tokens_total", WORKER, by=INSTANCE),
    )
    return [
        lines(
            "KV pages",
            "By state, over the chosen workers.",
            "none",
            Query(f"sum by (state) ({pages})", "{{state}}"),
            stacked=True,
            width=8,
        ),
        lines(
            "KV pages in use",
            "Share of a worker's pages that running sequences hold.",
            "percentunit",
            Query(
                share(
                    total("kvrail_engine_pages", WORKER, 'state="used"', by=INSTANCE),
                    total("kvrail_engine_pages", WORKER, by=INSTANCE),
                ),
                "{{instance}}",
            ),
            top=1,
            width=8,
        ),
        lines(
            "Prefix cache",
            "Share of prompt tokens that the cache held.",
            "percentunit",
            Query(hits, "{{instance}}"),
            top=1,
            width=8,
        ),
    ]


def _processes(ours: str, cores: str, memory: str, files: str) -> list[Panel]:
    """What processes take; ours: a series that only these have. The others: what a panel says of itself."""
    return [
        lines(
            "Processor",
            cores,
            "none",
            Query(_of_processes("process_cpu_seconds_total", ours, rises=True), "{{instance}}"),
            width=8,
        ),
        lines(
            "Memory",
            memory,
            "decbytes",
            Query(_of_processes("process_resident_memory_bytes", ours), "{{instance}}"),
            width=8,
        ),
        lines("Open files", files, "none", Query(_of_processes("process_open_fds", ours), "{{instance}}"), width=8),
    ]


def _worker_processes() -> list[Panel]:
    pages = series("kvrail_engine_pages", WORKER)
    builds = rows(
        "Builds", "Version and protocol of each process.", Query("kvrail_build_info", "{{instance}}"), width=24
    )
    return [*_processes(pages, "Cores in use.", "Resident memory of the host.", "Descriptors."), builds]


def workers() -> Dashboard:
    """What each worker does and holds."""
    sections = {"Load": _load(), "Steps": _steps(), "KV pages": _memory(), "Processes": _worker_processes()}
    description = "What each worker does and holds."
    return board("kvrail-workers", "workers", description, sections, workers="kvrail_engine_pages")


def _door() -> list[Panel]:
    return [
        lines(
            "HTTP by path",
            "Answers of each path.",
            "reqps",
            Query(rate("kvrail_http_requests_total", by="handler"), "{{handler}}"),
            stacked=True,
            width=8,
        ),
        lines(
            "HTTP by status",
            "Answers by status; 499: the client left first.",
            "reqps",
            Query(rate("kvrail_http_requests_total", by="status"), "{{status}}"),
            stacked=True,
            width=8,
        ),
        lines(
            "Time of an answer, p99",
            "From request to last byte, streams included.",
            "s",
            Query(quantile(0.99, "kvrail_http_request_seconds", by="handler"), "{{handler}}"),
            width=8,
        ),
    ]


def _queue() -> list[Panel]:
    return [
        number(
            "Prompts that wait",
            "In the router, for their turn.",
            "none",
            Query(total("kvrail_queue_prompts"), ""),
            width=6,
            steps=((None, "green"), (32, "orange"), (256, "red")),
        ),
        number(
            "Clients that wait", "By API key or address.", "none", Query(total("kvrail_queue_clients"), ""), width=6
        ),
        number(
            "Failovers",
            "Streams that another decode worker took over, per second.",
            "ops",
            Query(rate("kvrail_failovers_total"), ""),
            width=6,
            steps=((None, "green"), (0.001, "orange")),
        ),
        number(
            "Requests at once", "Admitted requests.", "none", Query(total("kvrail_requests_in_flight"), ""), width=6
        ),
        lines(
            "Time in the queue",
            "Until a prompt has its turn and a worker has room.",
            "s",
            *quantiles("kvrail_queue_seconds"),
            width=8,
        ),
        lines(
            "Queue",
            "Prompts that wait, and clients whose prompts wait.",
            "none",
            Query(total("kvrail_queue_prompts"), "prompts"),
            Query(total("kvrail_queue_clients"), "clients"),
            width=8,
        ),
        heat(
            "Place in the queue",
            "Prompts that waited already when one came.",
            "none",
            Query(rate("kvrail_queue_place_bucket", by="le"), "{{le}}"),
            width=8,
        ),
    ]


def _placing() -> list[Panel]:
    return [
        lines(
            "Placements by reason",
            "What decided between workers.",
            "ops",
            Query(rate("kvrail_placements_total", by="role, reason"), "{{role}}: {{reason}}"),
            width=8,
        ),
        lines(
            "Prefix tokens",
            "That decode workers were expected to hold, and that they found.",
            "none",
            Query(rate("kvrail_prefix_tokens_total", by="kind"), "{{kind}}"),
            width=8,
        ),
        bars(
            "Requests at workers",
            "Of this router, by worker, now.",
            "none",
            Query(total("kvrail_worker_requests_in_flight", by="role, worker"), "{{role}} {{worker}}"),
            width=8,
        ),
    ]


def _router_process() -> list[Panel]:
    return _processes(
        series("kvrail_queue_prompts"),
        "Cores in use. The router has one loop: near 1 it is what limits.",
        "Resident memory.",
        "Descriptors; each client's connection is one.",
    )


def router() -> Dashboard:
    """The door, the queue, and how requests are placed."""
    sections = {"Door": _door(), "Queue": _queue(), "Placing": _placing(), "Process": _router_process()}
    return board("kvrail-router", "router", "The door, the queue, and how requests are placed.", sections)
