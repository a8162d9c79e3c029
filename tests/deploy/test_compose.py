"""The compose cluster on a real engine: up, used, measured, hurt, mended, gone."""

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.grafana.source import live, vllm

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PROJECT = f"kvrail-test-{os.getpid()}"
VERSION = "9.9.9.dev1+gabcdef0"
SERVICES = ("router", "prefill", "decode")
CONFINED = (*SERVICES, "prometheus")
PATIENCE_S = 180.0
GPU_OVERLAY = ("--file", "compose.yaml", "--file", "deploy/docker/compose.gpu.yaml")
BOTH_OVERLAY = ("--file", "compose.yaml", "--file", "deploy/docker/compose.both.yaml")
log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)
QUESTION = (
    "You are asked by somebody who reads about serving language models for the first time. They have heard that "
    "prefill and decode can run on separate workers, that the keys and values cross from one to the other, and that "
    "this helps latency. They now ask you one question and want a short answer in plain words: what is a KV cache?"
)


def docker(*arguments, check=True, env=None, timeout=700):
    done = subprocess.run(
        ["docker", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def wait_for(what, condition, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.5)
    return found


class Cluster:
    """The cluster of compose.yaml under a project name and ports of its own."""

    def __init__(self):
        ports = {f"KVRAIL_{name}PORT": free_port() for name in ("", "ADMIN_", "PROMETHEUS_")}
        self.env = {**os.environ, **{name: str(port) for name, port in ports.items()}, "KVRAIL_VERSION": VERSION}
        self.api, self.admin, self.prometheus = (
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S)
            for port in ports.values()
        )

    def compose(self, *arguments, **options):
        return docker("compose", "--project-name", PROJECT, *arguments, env=self.env, **options)

    def up(self, *services, files=()):
        try:
            self.compose(*files, "up", "--detach", "--wait", "--wait-timeout", "600", *services)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.compose('logs', '--tail', '40', check=False)}") from None

    def inspect(self, service):
        return json.loads(docker("inspect", self.compose("ps", "--quiet", service).strip()))[0]

    def run_on(self, network, code):
        """What Python code prints in a container of its own on one of the cluster's networks."""
        client = ("run", "--rm", "--network", f"{PROJECT}_{network}", "--entrypoint", "python3", "kvrail-router")
        return docker(*client, "-c", code).strip()

    def states(self, role):
        """State of each worker of a role, as the router sees it, by address."""
        key = "workers" if role == "both" else f"{role}_workers"
        return {target: about["state"] for target, about in self.admin.get("/health").json()[key].items()}

    def ask(self, number, times=1, headers=None, **more):
        """(text, finish reason) of a greedy stream. Only prompts of the same `number` share KV; times: longer ones."""
        body = {
            "model": "kvrail-demo",
            "messages": [{"role": "user", "content": f"{number}. {QUESTION * times}"}],
            "temperature": 0,
            "max_tokens": 400,
            "stream": True,
            **more,
        }
        with self.api.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                response.read()
            response.raise_for_status()
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]

    def whole(self):
        """Whether the router counts both workers as healthy, and no others."""
        return [*self.states("prefill").values(), *self.states("decode").values()] == ["healthy", "healthy"]

    def query(self, expression):
        """(service, value) of each series of an instant query."""
        answer = self.prometheus.get("/api/v1/query", params={"query": expression}).raise_for_status().json()
        return [(each["metric"].get("service"), float(each["value"][1])) for each in answer["data"]["result"]]


@contextlib.contextmanager
def streams(cluster, count, numbers, **more):
    """So many clients, each of which streams one answer after another until the block ends."""
    over, faults = threading.Event(), []

    def client():
        try:
            while not over.is_set():
                cluster.ask(next(numbers), ignore_eos=True, **more)
        except (AssertionError, httpx.HTTPError) as error:
            faults.append(error)

    clients = [threading.Thread(target=client) for _ in range(count)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        over.set()
        for each in clients:
            each.join()
    assert faults == []


@pytest.fixture(scope="module")
def cluster():
    if subprocess.run(["docker", "info"], capture_output=True).returncode or not docker(
        "compose", "version", check=False
    ):
        pytest.fail("no Docker engine with Compose answers; start one, or set DOCKER_HOST")
    settings = yaml.safe_load((ROOT / "compose.yaml").read_text())
    base = os.environ.get("KVRAIL_BASE_IMAGE", "python:3.11-slim")
    script = ROOT / "tests" / "deploy" / "prometheus_image.sh"
    subprocess.run([script, settings["services"]["prometheus"]["image"], base], check=True, stdin=subprocess.DEVNULL)
    running = Cluster()
    try:
        running.compose("build")
        running.up()
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "5", check=False)


def test_a_streamed_answer_ends_by_itself(cluster):
    text, reason = cluster.ask(0)
    assert reason == "stop"
    assert len(text) > 20


@pytest.mark.parametrize("service", CONFINED)
def test_a_container_is_confined(cluster, service):
    about = cluster.inspect(service)
    host = about["HostConfig"]
    assert about["Config"]["User"] not in ("", "0", "root")
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["Privileged"]
    assert host["Memory"] > 0
    published = [port["HostIp"] for ports in (host["PortBindings"] or {}).values() for port in ports]
    assert published == ["127.0.0.1"] * {"router": 2, "prometheus": 1}.get(service, 0)


def test_images_know_the_version_that_they_were_built_as(cluster):
    assert cluster.api.get("/version").json() == {"version": VERSION}
    answer = cluster.prometheus.get("/api/v1/query", params={"query": "kvrail_build_info"}).raise_for_status().json()
    versions = {each["metric"]["service"]: each["metric"]["version"] for each in answer["data"]["result"]}
    assert versions == dict.fromkeys(("router", "prefill", "decode"), VERSION)


def test_the_routers_image_has_no_torch(cluster):
    find = ["python3", "-c", "import importlib.util as u; print(u.find_spec('torch') is None)"]
    assert cluster.compose("exec", "-T", "router", *find).strip() == "True"
    assert cluster.compose("exec", "-T", "decode", *find).strip() == "False"


ASK_WITHOUT_AND_WITH = """
import sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

def ask(channel):
    try:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20).status
    except grpc.RpcError as error:
        return error.code().name

address, certs = sys.argv[1:]
ca, key, own = (open(f"{certs}/{name}", "rb").read() for name in ("ca.pem", "router.key", "router.pem"))
name = [("grpc.ssl_target_name_override", "decode.kvrail.internal")]
print(
    ask(grpc.insecure_channel(address)),
    ask(grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), name)),
    ask(grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, own), name)),
)
"""


def test_a_client_without_a_certificate_is_refused(cluster):
    """In clear, then under TLS with nothing to show, then as a router."""
    answers = cluster.compose("exec", "-T", "router", "python3", "-c", ASK_WITHOUT_AND_WITH, "decode:7002", "/certs")
    assert answers.split() == ["UNAVAILABLE", "UNAVAILABLE", "1"]


def test_prometheus_sees_each_service_under_both_paths(cluster):
    engines = [service for service in SERVICES if service != "prefill"]  # prefill workers have none of vLLM's names
    for job, services in (("kvrail", SERVICES), ("kvrail-vllm", engines)):
        expected = sorted((service, 1.0) for service in services)
        wait_for(job, lambda job=job, expected=expected: sorted(cluster.query(f'up{{job="{job}"}} == 1')) == expected)


def test_the_rates_of_counters_have_values(cluster):
    numbers = itertools.count(1000)
    frames = "sum by (service) (rate(kvrail_kv_frames_total[1m]))"
    answered = 'sum by (service) (rate(kvrail_requests_total{service="router", outcome="stop"}[1m]))'

    def rates():
        """A rate shows once two scrapes lie on either side of an increase, which each service is scraped at its own."""
        cluster.ask(next(numbers))
        found = dict(cluster.query(frames) + cluster.query(answered))
        return found if all(found.get(service, 0) > 0 for service in SERVICES) else None

    found = wait_for("a counter of KV frames or of answers does not rise", rates)
    assert not any(math.isnan(value) for value in found.values())


def test_every_panel_and_rule_has_an_answer(cluster):
    numbers = itertools.count(3000)

    def found():
        cluster.ask(next(numbers))
        return live.faults(str(cluster.prometheus.base_url).rstrip("/"))

    try:
        wait_for("faults", lambda: not found())
    except AssertionError:
        pytest.fail("\n".join(found()))


def test_vllms_own_dashboards_show_what_happens(cluster):
    url = str(cluster.prometheus.base_url).rstrip("/")
    with streams(cluster, 3, itertools.count(4000)):
        running = set()

        def three():
            running.update(vllm.panel(url, vllm.OVERVIEW, "Running"))
            return 3 in running

        wait_for("three streams are not shown as running", three)
        assert vllm.panel(url, vllm.OVERVIEW, "Engines") == [1]
        try:
            wait_for("faults", lambda: not vllm.faults(url))
        except AssertionError:
            pytest.fail("\n".join(vllm.faults(url)))
        three()
    assert max(running) == 3
    wait_for("streams that ended run", lambda: vllm.panel(url, vllm.OVERVIEW, "Running") == [0])


def test_the_public_port_tells_a_stranger_nothing(cluster):
    """The page and the metrics are at the admin port, which clients' containers do not reach, and which drains."""
    assert cluster.api.get("/health").json() == {"status": "ok"}
    for path in ("/", "/status.json", "/metrics", "/metrics/vllm", "/metrics/targets"):
        assert cluster.api.get(path).status_code == 404
        assert cluster.admin.get(path).status_code == 200
    assert cluster.api.post("/drain").status_code == 404
    services = {target["labels"]["service"] for target in cluster.admin.get("/metrics/targets").json()}
    assert services == set(SERVICES)


def test_a_container_in_front_reaches_the_router_and_no_worker(cluster):
    workers = [*cluster.states("prefill"), *cluster.states("decode")]
    assert len(workers) == 2
    dial = """
import socket
from concurrent.futures import ThreadPoolExecutor
def tried(address):
    try:
        socket.create_connection(address, timeout=3).close()
        return "open"
    except OSError:
        return "shut"
print(*ThreadPoolExecutor(32).map(tried, {dialled!r}))
"""
    dialled = [(target.rpartition(":")[0], int(target.rpartition(":")[2])) for target in workers]
    dialled += [(host, 9100) for host, _ in dialled] + [("prefill", 7001), ("decode", 7002)]
    networks = cluster.inspect("router")["NetworkSettings"]["Networks"]
    operators = [("router", 9100), ("router-admin", 9100), ("prometheus", 9090)]
    operators += [(about["IPAddress"], 9100) for about in networks.values()]
    assert set(cluster.run_on("front", dial.format(dialled=dialled + operators)).split()) == {"shut"}
    assert set(cluster.run_on("kv", dial.format(dialled=dialled)).split()) == {"open"}
    assert set(cluster.run_on("kv", dial.format(dialled=operators[:2])).split()) == {"shut"}
    assert set(cluster.run_on("admin", dial.format(dialled=dialled)).split()) == {"shut"}
    assert cluster.run_on("admin", dial.format(dialled=[("router-admin", 9100)])) == "open"
    assert cluster.run_on("front", dial.format(dialled=[("router", 8000)])) == "open"


def test_a_second_prefill_worker_is_used_and_may_leave_again(cluster):
    cluster.up("--scale", "prefill=2", "--no-recreate", "prefill")
    wait_for(
        "the second prefill worker is not found", lambda: list(cluster.states("prefill").values()).count("healthy") == 2
    )
    numbers, received = itertools.count(2000), "kvrail_kv_frames_total"
    containers = cluster.compose("ps", "--quiet", "prefill").split()

    def frames(container):
        """Frames of KV that a worker has sent."""
        read = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        shown = docker("exec", container, "python3", "-c", read).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in shown if line.startswith(received))

    before = {container: frames(container) for container in containers}
    assert len(containers) == 2
    with streams(cluster, 3, numbers, times=8, max_tokens=20):  # long prompts, which the decode worker leaves to others
        wait_for(
            "one of two prefill workers gets nothing",
            lambda: all(frames(container) > before[container] for container in containers),
        )
    cluster.up("--scale", "prefill=1", "--no-recreate", "prefill")
    wait_for("the router does not see that a worker left", cluster.whole)
    assert cluster.ask(next(numbers))[0]


def test_without_its_prefill_worker_the_cluster_still_answers(cluster):
    cluster.compose("kill", "prefill")
    answer = cluster.ask(1)
    wait_for("the loss is not seen", lambda: ("prefill", 1.0) not in cluster.query('up{job="kvrail"}'))
    cluster.up("prefill")
    cluster.compose("restart", "decode")  # it forgets the KV that it computed by itself
    cluster.up("decode")
    wait_for("the router does not see its workers again", cluster.whole)
    assert cluster.ask(1) == answer


def test_without_its_decode_worker_the_cluster_says_so_and_recovers(cluster):
    answer = cluster.ask(2)
    cluster.compose("kill", "decode")
    body = {"model": "kvrail-demo", "messages": [{"role": "user", "content": QUESTION}]}
    refused = cluster.api.post("/v1/chat/completions", json=body)  # a stream's headers may leave before it is known
    assert refused.status_code == 503
    assert refused.json()["error"]["message"]
    began = time.monotonic()
    cluster.up("decode")
    wait_for("the router does not see its worker again", cluster.whole)
    log.info("a decode worker that was killed is back after %.1f s", time.monotonic() - began)
    assert cluster.ask(2) == answer


def test_a_second_start_compiles_nothing(cluster):
    find = "from pathlib import Path; print(sorted((p.name, p.stat().st_mtime) for p in Path('/cache').rglob('*.nbc')))"
    kernels = ["exec", "-T", "decode", "python3", "-c", find]
    compiled = cluster.compose(*kernels)
    assert ".nbc" in compiled
    cluster.compose("down", "--timeout", "30")
    began = time.monotonic()
    cluster.up()
    log.info("the second start took %.1f s", time.monotonic() - began)
    wait_for("the router does not see its workers", cluster.whole)
    assert cluster.ask(3)[1] == "stop"
    assert cluster.compose(*kernels) == compiled


@contextlib.contextmanager
def receiver(cluster):
    """A container on the workers' network that gets traces as `collector`; yields what it has got, as a function."""
    folder = ROOT / "tests" / "tracing"
    network = ("--network", f"{PROJECT}_kv", "--network-alias", "collector", "--volume", f"{folder}:/tracing:ro")
    image = ("--entrypoint", "python3", "kvrail-router", "/tracing/collector.py", "0.0.0.0:4317")
    container = docker("run", "--detach", *network, *image).strip()
    before = cluster.env.get("KVRAIL_OTLP_ENDPOINT", "")
    cluster.env["KVRAIL_OTLP_ENDPOINT"] = "http://collector:4317"
    try:
        yield lambda: [json.loads(line) for line in docker("logs", container).splitlines()]
    finally:
        cluster.env["KVRAIL_OTLP_ENDPOINT"] = before
        docker("rm", "--force", container)


def test_a_request_is_one_trace_over_three_services(cluster):
    names = {f"kvrail-{service}" for service in SERVICES}
    with receiver(cluster) as spans:
        cluster.up()
        wait_for("the router does not see its workers", cluster.whole)
        trace = f"{os.getpid():032x}"
        traceparent = f"00-{trace}-{1:016x}-01"
        cluster.ask(7, headers={"traceparent": traceparent})

        def told():
            found = [span for span in spans() if span["trace_id"] == trace]
            known = {f"{1:016x}", *(span["span_id"] for span in found)}
            whole = all(span["parent"] in known for span in found)
            return whole and {span["service"] for span in found} == names

        wait_for("the trace is not whole", told)
    cluster.up()
    wait_for("the router does not see its workers", cluster.whole)


def test_two_workers_of_both_roles_take_over_and_give_back(cluster):
    """The cluster changes over; one of the two is killed while streams run, and comes back; so do the first two."""

    def healthy(count):
        return lambda: list(cluster.states("both").values()) == ["healthy"] * count

    answer = cluster.ask(1)
    cluster.up(files=BOTH_OVERLAY)
    wait_for("the router does not see its workers of both roles", healthy(2))
    assert (cluster.states("prefill"), cluster.states("decode")) == ({}, {})
    wait_for("they are not scraped", lambda: cluster.query('up{job="kvrail"} == 1').count(("worker", 1.0)) == 2)
    with streams(cluster, 4, itertools.count(5000), max_tokens=60):
        docker("kill", cluster.compose(*BOTH_OVERLAY, "ps", "--quiet", "worker").split()[0])
        wait_for("the loss is not seen", healthy(1))
        assert cluster.ask(1) == answer
    cluster.up(files=BOTH_OVERLAY)
    wait_for("the router does not see the worker again", healthy(2))
    cluster.up("--remove-orphans")
    wait_for("the router does not see its first workers again", cluster.whole)
    assert cluster.ask(1) == answer


def test_the_overlay_for_gpus_gives_each_worker_a_gpu(cluster):
    told = json.loads(cluster.compose(*GPU_OVERLAY, "config", "--format", "json"))["services"]
    for role, gpu in (("prefill", "0"), ("decode", "1")):
        (device,) = told[role]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"], device["capabilities"]) == ("nvidia", [gpu], ["gpu"])
        assert told[role]["environment"][f"KVRAIL_{role.upper()}_DEVICE"] == "cuda"
        assert told[role]["image"] == "kvrail-worker-gpu"
        assert told[role]["read_only"]
    assert told["prefill"]["build"]["target"] == "worker-gpu"


def test_stopping_is_graceful_and_leaves_nothing(cluster):
    cluster.compose("stop")
    for service in SERVICES:
        container = cluster.compose("ps", "--all", "--quiet", service).strip()
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "0", service
    cluster.compose("down", "--volumes")
    label = f"label=com.docker.compose.project={PROJECT}"
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        assert docker(*kind, "--quiet", "--filter", label) == ""
