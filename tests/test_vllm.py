"""vLLM's names: which process shows which, with vLLM's meaning, so that its own dashboards read a cluster right."""

from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrail.telemetry import buckets
from kvrail.telemetry.exposition import Exposition
from kvrail.telemetry.router import RouterMetrics
from kvrail.telemetry.series import Registry
from kvrail.telemetry.worker import CodecMetrics, EngineMetrics, TransferMetrics

Samples = dict[str, list[tuple[dict[str, str], float]]]

# Of vllm_overview.json, as vLLM ships it for Grafana: every series that a panel asks for, and labels it asks for.
OVERVIEW = {
    "http_request_duration_seconds_count": {"handler"},
    "http_request_duration_seconds_sum": {"handler"},
    "http_requests_total": {"handler", "status"},
    "vllm:e2e_request_latency_seconds_bucket": {"le"},
    "vllm:e2e_request_latency_seconds_count": set(),
    "vllm:e2e_request_latency_seconds_sum": set(),
    "vllm:generation_tokens_total": set(),
    "vllm:inter_token_latency_seconds_bucket": {"le"},
    "vllm:inter_token_latency_seconds_count": set(),
    "vllm:inter_token_latency_seconds_sum": set(),
    "vllm:iteration_tokens_total_bucket": {"le"},
    "vllm:iteration_tokens_total_count": set(),
    "vllm:iteration_tokens_total_sum": set(),
    "vllm:kv_cache_usage_perc": set(),
    "vllm:num_preemptions_total": set(),
    "vllm:num_requests_running": set(),
    "vllm:num_requests_waiting": set(),
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:prefix_cache_hits_total": set(),
    "vllm:prefix_cache_queries_total": set(),
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:prompt_tokens_total": set(),
    "vllm:request_decode_time_seconds_count": set(),
    "vllm:request_decode_time_seconds_sum": set(),
    "vllm:request_generation_tokens_bucket": {"le"},
    "vllm:request_generation_tokens_count": set(),
    "vllm:request_generation_tokens_sum": set(),
    "vllm:request_prefill_time_seconds_count": set(),
    "vllm:request_prefill_time_seconds_sum": set(),
    "vllm:request_prompt_tokens_bucket": {"le"},
    "vllm:request_prompt_tokens_count": set(),
    "vllm:request_prompt_tokens_sum": set(),
    "vllm:request_queue_time_seconds_bucket": {"le"},
    "vllm:request_queue_time_seconds_count": set(),
    "vllm:request_queue_time_seconds_sum": set(),
    "vllm:request_success_total": {"finished_reason"},
    "vllm:request_time_per_output_token_seconds_bucket": {"le"},
    "vllm:request_time_per_output_token_seconds_count": set(),
    "vllm:request_time_per_output_token_seconds_sum": set(),
    "vllm:time_to_first_token_seconds_bucket": {"le"},
    "vllm:time_to_first_token_seconds_count": set(),
    "vllm:time_to_first_token_seconds_sum": set(),
}
# vLLM's bounds (0.26); its token counts' go on in the same steps to the model's context.
_REQUEST = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
_FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
_TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0 2000.0 5000.0 10000.0 20000.0 50000.0 100000.0"
BOUNDS = {
    "vllm:e2e_request_latency_seconds": _REQUEST,
    "vllm:request_queue_time_seconds": _REQUEST,
    "vllm:request_prefill_time_seconds": _REQUEST,
    "vllm:request_decode_time_seconds": _REQUEST,
    "vllm:request_inference_time_seconds": _REQUEST,
    "vllm:time_to_first_token_seconds": _FIRST,
    "vllm:inter_token_latency_seconds": _TOKEN,
    "vllm:request_time_per_output_token_seconds": _TOKEN,
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vllm:request_max_num_generation_tokens": _TOKENS,
    "vllm:request_params_max_tokens": _TOKENS,
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "vllm:request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0",
    "vllm:iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
    "http_request_duration_seconds": "0.1 0.5 1.0",
}


def samples(exposition: Exposition, path: str = "/metrics/vllm") -> Samples:
    found: Samples = defaultdict(list)
    for family in text_string_to_metric_families(exposition.render(path, sums=False)[0].decode()):
        for sample in family.samples:
            found[sample.name].append((dict(sample.labels), sample.value))
    return found


class Processes:
    """What router, decode and prefill worker show: three streams run, one waits for its KV, prompts wait at both."""

    def __init__(self) -> None:
        router, decode, prefill = Registry(), Registry(), Registry()
        self.requests = RouterMetrics(router, "m")
        self.requests.running.set(3)
        self.requests.queue_length.set(2)
        self.requests.answered("/v1/models", "GET", 200, 0.1)
        self.engine = EngineMetrics(decode, "m")
        self.engine.set_load(running=4, waiting=5, receiving=1)
        self.engine.set_pages(free=50, used=25, cached=25)
        self.engine.show_cache(page_size=64, pages=100, cache_bytes=1 << 20, kv_dtype="bfloat16", prefix_cache=True)
        TransferMetrics(decode, "m", (), ("received",)), CodecMetrics(decode, "m", encodes=False)
        other = EngineMetrics(prefill, "m", receives=False, drafts=False)
        other.set_load(running=3, waiting=3)
        other.set_pages(free=0, used=10, cached=0)
        TransferMetrics(prefill, "m", (), ("sent",)), CodecMetrics(prefill, "m", decodes=False)
        self.router, self.decode = Exposition(router), Exposition(decode)
        self.prefill = Exposition(prefill, vllm=False)

    def total(self, name: str, **labels: str) -> float:
        """What a dashboard's sum over all processes shows."""
        return sum(
            value
            for exposition in (self.router, self.decode, self.prefill)
            for found, value in samples(exposition)[name]
            if labels.items() <= found.items()
        )


@pytest.fixture(scope="module")
def cluster() -> Processes:
    return Processes()


def test_sums_over_a_cluster_count_nothing_twice(cluster: Processes):
    assert cluster.total("vllm:num_requests_running") == 3
    assert cluster.total("vllm:num_requests_waiting") == 2 + 5 + 1
    assert cluster.total("vllm:num_requests_waiting_by_reason", reason="capacity") == 2 + 5
    assert cluster.total("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert len(samples(cluster.decode)["vllm:num_requests_running"]) == 1  # the dashboard's number of engines
    assert "vllm:num_requests_running" not in samples(cluster.router)
    assert samples(cluster.prefill) == {}
    shared = set(samples(cluster.router)) & set(samples(cluster.decode))
    assert shared == {"vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"}


def test_router_and_workers_share_no_name_of_ours(cluster: Processes):
    ours = [set(samples(each, "/metrics")) for each in (cluster.router, cluster.decode)]
    assert not ours[0] & ours[1]


def test_the_engines_numbers(cluster: Processes):
    shown = samples(cluster.decode)
    labels = {"model_name": "m", "engine": "0"}
    assert shown["vllm:kv_cache_usage_perc"] == [(labels, 0.25)]
    assert shown["vllm:num_requests_waiting_by_reason"] == [
        (labels | {"reason": "capacity"}, 5),
        (labels | {"reason": "deferred"}, 1),
    ]
    config, one = shown["vllm:cache_config_info"][0]
    assert one == 1
    # What the Gateway API inference extension reads.
    assert (config["block_size"], config["num_gpu_blocks"]) == ("64", "100")
    fresh = Registry()
    EngineMetrics(fresh, "m")
    assert samples(Exposition(fresh))["vllm:kv_cache_usage_perc"] == [(labels, 0)]


def test_counters_of_the_engine_and_of_drafts():
    registry = Registry()
    engine = EngineMetrics(registry, "m")
    exposition = Exposition(registry)
    engine.preemptions.inc(2)
    engine.prefix_queried_tokens.inc(100)
    engine.prefix_hit_tokens.inc(40)
    engine.step_tokens.observe(17)
    engine.drafts_proposed.inc(12)
    engine.drafts_accepted.inc(7)
    engine.accepted_drafts.observe(7)
    expected = {
        "num_preemptions_total": 2,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 40,
        "iteration_tokens_total_sum": 17,
        "spec_decode_num_drafts_total": 1,
        "spec_decode_num_draft_tokens_total": 12,
        "spec_decode_num_accepted_tokens_total": 7,
    }
    assert {name: samples(exposition)[f"vllm:{name}"][0][1] for name in expected} == expected


def test_outcomes_in_vllms_words():
    registry = Registry()
    requests = RouterMetrics(registry, "m")
    for count, outcome in enumerate(requests.outcomes, start=1):
        requests.outcomes[outcome].inc(10**count)
    found = {
        labels["finished_reason"]: value
        for labels, value in samples(Exposition(registry))["vllm:request_success_total"]
    }
    places = {outcome: 10**count for count, outcome in enumerate(requests.outcomes, start=1)}
    assert found == {
        "stop": places["stop"],
        "length": places["length"],
        "abort": places["cancelled"],
        "error": places["unavailable"] + places["deadline"] + places["error"],
    }


def test_the_overview_dashboard_finds_every_series_it_asks_for(cluster: Processes):
    found: Samples = defaultdict(list)
    for exposition in (cluster.router, cluster.decode, cluster.prefill):
        for name, series in samples(exposition).items():
            found[name] += series
    for name, labels in OVERVIEW.items():
        assert found[name], name
        wanted = labels | ({"model_name"} if name.startswith("vllm:") else set())
        assert all(wanted <= set(theirs) for theirs, _ in found[name]), name


@pytest.mark.parametrize("name", BOUNDS)
def test_vllms_buckets_are_among_ours(cluster: Processes, name: str):
    wanted = set(BOUNDS[name].split())
    shown = [*samples(cluster.router)[f"{name}_bucket"], *samples(cluster.decode)[f"{name}_bucket"]]
    assert wanted <= {labels["le"] for labels, _ in shown}


def test_bounds_rise():
    for name, bounds in vars(buckets).items():
        if name.isupper() and not name.startswith("_"):
            assert list(bounds) == sorted(set(bounds)), name
