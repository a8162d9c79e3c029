"""The workers in the router's metrics and in its service discovery."""

from typing import Any

from kvrail.services.router.fleet.policy import WorkerState
from kvrail.services.router.fleet.worker import Worker
from kvrail.services.router.fleet.workers import WorkerPool
from kvrail.telemetry.router import RouterMetrics


def show_workers(pool: WorkerPool, metrics: RouterMetrics) -> None:
    """Bring the gauges of the workers, and of all decode workers together, up to date; called when metrics are read."""
    for worker in (*pool.workers, *pool.leaving.values()):
        metrics.show_worker(
            worker.role,
            worker.target,
            state=worker.state,
            states=list(WorkerState),
            requests=worker.requests,
            backlog=worker.backlog,
            target=_metrics_address(worker),
        )
    answers = [each.answer for each in pool.decode.values() if each.answer and each.state is WorkerState.HEALTHY]
    metrics.cluster_waiting.set(metrics.queue_length.value + sum(answer.waiting for answer in answers))
    metrics.cluster_running.set(sum(answer.running for answer in answers))
    pages = sum(answer.pages_total for answer in answers)
    used = pages - sum(answer.pages_free + answer.pages_cached for answer in answers)
    metrics.cluster_kv_usage.set(used / pages if pages else 0.0)
    metrics.show_cache(pool.page_size, pages)


def scrape_targets(pool: WorkerPool, router: str, *, vllm: bool, router_tls: bool) -> list[dict[str, Any]]:
    """The targets of Prometheus, in the form of its HTTP service discovery.

    router: this router's host:port as the caller has it. vllm: for vLLM's names, which prefill workers do not have;
    all targets are then one instance, since vLLM's dashboards look for requests where engines are. router_tls: its
    metrics are behind TLS. It shows no sums over workers there.
    """

    def group(address: str, tls: bool, labels: dict[str, str]) -> dict[str, Any]:
        common = {"__metrics_path__": "/metrics/vllm", "instance": router} if vllm else {}
        scheme = {"__scheme__": "https"} if tls else {}
        return {"targets": [address], "labels": common | scheme | labels}

    found = [group(router, router_tls, {"service": "router", "__param_sums": "off"})]
    for worker in pool.workers:
        address = _metrics_address(worker)  # empty where it has reported no port
        if worker.answer and address and not (vllm and worker.role == "prefill"):
            service = "worker" if worker.role == "both" else worker.role  # the command that runs it
            labels = {"service": service, "worker": worker.target}
            found.append(group(address, worker.answer.metrics_tls, labels))
    return found


def _metrics_address(worker: Worker) -> str:
    """Host and port of a worker's metrics; empty where it has reported no port."""
    if worker.answer is None or not worker.answer.metrics_port:
        return ""
    return f"{worker.target.rpartition(':')[0]}:{worker.answer.metrics_port}"
