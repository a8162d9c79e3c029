"""The boards of the whole: overview, and one request's path."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana.source.parts import FAILURES, SLOW, Panel, bars, board, heat, lines, number, states
from deploy.grafana.source.queries import (
    TOKEN_RATE,
    WORKER_NAME,
    Query,
    increase,
    mean,
    named,
    quantile,
    quantiles,
    rate,
    share,
    split,
    total,
)
from deploy.grafana.source.workers import STATE

FAILED = 'outcome=~"error|unavailable|deadline|overloaded"'
RATIO_STEPS = ((None, "green"), (0.01, "orange"), (0.05, "red"))


def _now() -> list[Panel]:
    errors = share(f"({rate('kvrail_requests_total', FAILED)} or vector(0))", rate("kvrail_requests_total"))
    received = 'direction="received"'
    saved = share(
        f"({rate('kvrail_kv_raw_bytes_total', received)} - {rate('kvrail_kv_payload_bytes_total', received)})",
        rate("kvrail_kv_raw_bytes_total", received),
    )
    return [
        number("Requests/s", "Requests that ended, however they did.", "reqps", rate("kvrail_requests_total")),
        number(
            "Tokens/s", "Generated tokens that reached the router.", TOKEN_RATE, rate("kvrail_generation_tokens_total")
        ),
        number(
            "Time to first token, p99",
            "From request to first token.",
            "s",
            quantile(0.99, "kvrail_time_to_first_token_seconds"),
        ),
        number(
            "Failed requests",
            "Share of requests that ended in an error of the server: error, unavailable, deadline, overloaded.",
            "percentunit",
            errors,
            steps=RATIO_STEPS,
        ),
        number("KV saved", "Share of the KV bytes that compression kept off the wire.", "percentunit", saved),
        number(
            "Workers that take requests",
            "Workers that answer, fit the model and are not draining, as the router sees them.",
            "count:workers",
            f"{total('kvrail_worker_up')} or vector(0)",
        ),
    ]


def _latency() -> list[Panel]:
    return [
        lines(
            "Time to first token",
            "From request to first token.",
            "s",
            *quantiles("kvrail_time_to_first_token_seconds"),
            links=[SLOW],
        ),
        lines(
            "Time between tokens", "Between two tokens of one sequence.", "s", *quantiles("kvrail_inter_token_seconds")
        ),
        lines(
            "Time of a request",
            "From request to last byte, of requests that were answered in full.",
            "s",
            *quantiles("kvrail_request_seconds"),
            links=[SLOW],
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        lines(
            "Requests by how they ended",
            "stop and length are answers in full.",
            "reqps",
            split(rate, "kvrail_requests_total", by="outcome"),
            stacked=True,
            links=[FAILURES],
        ),
        lines(
            "Requests at once",
            "Admitted requests: waiting for their first token, or running.",
            "count:requests",
            split(total, "kvrail_requests_in_flight", by="state"),
            stacked=True,
        ),
        lines(
            "Tokens/s",
            "Prompt tokens of answered requests, and generated tokens.",
            TOKEN_RATE,
            Query(rate("kvrail_prompt_tokens_total"), "prompt"),
            Query(rate("kvrail_generation_tokens_total"), "generated"),
        ),
    ]


def _workers() -> list[Panel]:
    used, pages = (
        total("kvrail_engine_pages", 'state="used"', by="instance"),
        total("kvrail_engine_pages", by="instance"),
    )
    return [
        states("Workers", "Each worker's state, as the router sees it.", Query(STATE, WORKER_NAME), width=12),
        lines(
            "KV pages in use",
            "Share of a worker's pages that running sequences hold; cached pages can be taken.",
            "percentunit",
            Query(named(share(used, pages)), WORKER_NAME),
            top=1,
            width=12,
        ),
    ]


def overview() -> Dashboard:
    """How the cluster is, on one screen."""
    sections = {"Now": _now(), "Latency": _latency(), "Traffic": _traffic(), "Workers": _workers()}
    return board("kvrail-overview", "overview", "How the cluster is, on one screen.", sections)


def _whole() -> list[Panel]:
    parts = "kvrail_request_stage_seconds"
    answered = rate("kvrail_request_seconds_count")
    means = share(increase(f"{parts}_sum", by="stage"), increase(f"{parts}_count", by="stage"))
    return [
        lines(
            "A request's time by part",
            "Mean time of each part of a request; the parts add up to the request.",
            "s",
            split(mean, parts, by="stage"),
            stacked=True,
            width=16,
        ),
        bars(
            "Parts over the range",
            "Mean time of each part of the requests in the board's time range.",
            "s",
            Query(f"sort_desc({means})", "{{stage}}"),
        ),
        lines(
            "The parts add up",
            "Mean time of a request, and the sum of the means of its parts.",
            "s",
            Query(mean("kvrail_request_seconds"), "request"),
            Query(share(rate(f"{parts}_sum"), answered), "sum of its parts"),
            width=12,
        ),
        lines(
            "99th percentile by part",
            "Of each part by itself: these do not add up.",
            "s",
            Query(quantile(0.99, parts, by="stage"), "{{stage}}"),
            links=[SLOW],
            width=12,
        ),
    ]


def _first() -> list[Panel]:
    return [
        heat(
            "Time to first token",
            "How requests are spread over the time to their first token.",
            "s",
            split(rate, "kvrail_time_to_first_token_seconds_bucket", by="le"),
            width=12,
        ),
        lines(
            "Phases",
            "Mean time until prefill began, from there to the first token, and from there to the last.",
            "s",
            split(mean, "kvrail_request_phase_seconds", by="phase"),
            stacked=True,
            width=12,
        ),
        lines(
            "Time to the k-th token",
            "Median time from request to a choice's k-th token: verified, or shown as a draft"
            " to a client that asks for drafts.",
            "s",
            Query(quantile(0.5, "kvrail_time_to_token_seconds", by="k, kind"), "token {{k}}, {{kind}}"),
            width=12,
        ),
        heat(
            "Time between tokens",
            "How the gaps between tokens of one sequence are spread.",
            "s",
            split(rate, "kvrail_inter_token_seconds_bucket", by="le"),
            width=12,
        ),
    ]


def _sizes() -> list[Panel]:
    return [
        lines(
            "Prompt tokens of a request",
            "Quantiles over answered requests.",
            "count:tokens",
            *quantiles("kvrail_request_prompt_tokens"),
        ),
        lines(
            "Generated tokens of a request",
            "Over all its sequences.",
            "count:tokens",
            *quantiles("kvrail_request_generation_tokens"),
        ),
        lines(
            "Where prompt tokens came from",
            "Computed by the decode worker, found in its prefix cache, or transferred from a prefill worker.",
            TOKEN_RATE,
            split(rate, "kvrail_prompt_tokens_by_source_total", by="source"),
            stacked=True,
        ),
    ]


def request_path() -> Dashboard:
    """Where the time of a request goes."""
    sections = {"The whole": _whole(), "First token and gaps": _first(), "Sizes": _sizes()}
    description = "Where the time of a request goes: its parts add up to it."
    return board("kvrail-request", "one request's path", description, sections)
