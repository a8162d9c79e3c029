"""The chart's pods, started with the project's own images by `podman kube play`, answer requests.

`make chart-podman` gives pytest namespaces of its own, so bridges, rules, mounts and processes end with it.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

import httpx
import pytest
import yaml

from tests.deploy.test_chart import of_kind, rendered
from tests.deploy.test_compose import PATIENCE_S, QUESTION, VERSION, docker, wait_for

pytestmark = [pytest.mark.podman, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
START_S = 400.0
TAG = f"podman-{uuid.uuid4().hex[:8]}"
BUILT = {"router": "router", "prefill": "worker"}
"""Services of compose.yaml that build an image, and its name."""
VALUES = {
    "model": {"name": "/models/kvrail-demo", "volume": {"hostPath": {"path": str(ROOT / "models")}}},
    "images": {each: {"repository": f"localhost/kvrail-{each}", "tag": TAG} for each in BUILT.values()},
}
"""The only values that are not the chart's defaults; `pods` adds a volume for kernels, which the workers share."""
CONFIG = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]  # podman's own may be above what the host allows
[network]
network_backend = "netavark"  # the other one of podman 4.3 resolves no names
"""
SHARED = ("/dev/shm", "/run/containers", "/run/netns", "/var/lib/containers/cache")
"""Where podman keeps what no flag moves: locks, networks' addresses, namespaces, which layers it saw."""


class Podman:
    """podman with all of its state in `folder`."""

    def __init__(self, folder):
        (folder / "containers.conf").write_text(CONFIG)
        self.env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf"), "TMPDIR": str(folder)}
        self.command = ["podman", "--events-backend=file", "--storage-driver=overlay"]
        # crun refuses a host with control groups of both versions; systemd need not run.
        self.command += ["--runtime=runc", "--cgroup-manager=cgroupfs"]
        for flag, name in {"root": "root", "runroot": "run", "network-config-dir": "networks", "tmpdir": "tmp"}.items():
            self.command.append(f"--{flag}={folder / name}")

    def run(self, *arguments, **options):
        return subprocess.run(
            [*self.command, *arguments], env=self.env, capture_output=True, text=True, timeout=300, **options
        )

    def __call__(self, *arguments, **options):
        done = self.run(*arguments, **options)
        assert done.returncode == 0, f"podman {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def address(self, pod):
        infra = json.loads(self("pod", "inspect", pod))["InfraContainerID"]
        (network,) = json.loads(self("inspect", infra))[0]["NetworkSettings"]["Networks"].values()
        return network["IPAddress"]


def pods_of(deployment):
    """The pods that a Deployment's controller makes, without what podman 4.3 lacks."""
    for number in range(deployment["spec"]["replicas"]):
        name = f"{deployment['metadata']['name']}-{number}"
        spec = json.loads(json.dumps(deployment["spec"]["template"]["spec"]))
        (container,) = spec["containers"]
        del container["ports"]  # podman publishes them on the host, where all pods would meet
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            del container[probe]  # podman asks by curl, which the images lack; this test asks instead
        for each in (*spec["volumes"], *container["volumeMounts"]):
            each["name"] += f"-{name}"  # podman's emptyDir is a volume of that name, which pods would share
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@pytest.fixture(scope="module")
def podman():
    """podman with the network `pods`, on which names are resolved; skips where no container starts."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.fail("podman would change this machine's network; run make chart-podman")
    if shutil.which("podman") is None:
        pytest.skip("NOT RUN: the chart's pods; podman is not installed")
    with tempfile.TemporaryDirectory(prefix="kvrail-podman-") as folder:  # gigabytes, which pytest would keep
        podman = Podman(Path(folder))
        for path in SHARED:
            Path(path).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
        for trial in (("network", "create", "pods"), ("run", "--rm", "--network=pods", "--rootfs", "/:O", "true")):
            done = podman.run(*trial)
            if done.returncode:
                pytest.skip(f"NOT RUN: the chart's pods; podman starts no container on this host: {done.stderr}")
        try:
            yield podman
        finally:
            podman.run("kill", "--all")  # else each pod's pause container would be waited for
            podman("pod", "rm", "--all", "--force")


@pytest.fixture(scope="module")
def images(podman, tmp_path_factory):
    """The images that compose.yaml builds, with the layers of `make compose-test`, in podman's store."""
    override = tmp_path_factory.mktemp("compose") / "tags.json"
    names = [f"kvrail-{each}:{TAG}" for each in BUILT.values()]
    override.write_text(json.dumps({"services": {k: {"image": v} for k, v in zip(BUILT, names, strict=True)}}))
    env = {**os.environ, "KVRAIL_VERSION": VERSION}
    docker("compose", "--file", "compose.yaml", "--file", str(override), "build", *BUILT, env=env)
    try:
        with subprocess.Popen(["docker", "save", *names], stdout=subprocess.PIPE) as saved:
            podman("load", "--quiet", stdin=saved.stdout)
    finally:
        docker("rmi", *names)


@pytest.fixture(scope="module")
def pods(podman, images, tmp_path_factory):
    """The pods by role, each ready by its own word."""
    folder, kernels = tmp_path_factory.mktemp("pods"), tmp_path_factory.mktemp("kernels")
    os.chown(kernels, 10001, 10001)
    objects, _ = rendered(VALUES | {"worker": {"kernelVolume": {"hostPath": {"path": str(kernels)}}}})
    played = {}
    for role, deployment in of_kind(objects, "Deployment").items():
        service = f"{deployment['metadata']['name']}.llm.svc.cluster.local"  # podman knows no Services
        played[role] = [pod["metadata"]["name"] for pod in pods_of(deployment)]
        for pod in pods_of(deployment):
            (folder / "pod.yaml").write_text(yaml.safe_dump(pod))
            podman("kube", "play", f"--network=pods:alias={service}", str(folder / "pod.yaml"))
    for role, names in played.items():
        for name in names:
            address = podman.address(name)
            try:
                wait_for(f"{name} is not ready", lambda role=role, address=address: is_ready(address, role), START_S)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{podman.run('logs', '--tail=40', f'{name}-{role}')}") from None
    return played


def is_ready(address, role):
    """Whether a pod says that it serves, and a router that it reaches workers of both roles."""
    try:
        health = httpx.get(f"http://{address}:9100/health", trust_env=False)
    except httpx.TransportError:
        return False
    if role != "router" or health.status_code != 200:
        return health.status_code == 200
    pools = (health.json()["prefill_workers"], health.json()["decode_workers"])
    return all([worker["state"] for worker in pool.values()] == ["healthy"] for pool in pools)


def test_each_router_answers_with_kv_of_the_prefill_pod(podman, pods):
    assert {role: len(names) for role, names in pods.items()} == {"router": 2, "prefill": 1, "decode": 1}
    for name in pods["router"]:
        body = {
            "model": "kvrail-demo",
            "messages": [{"role": "user", "content": f"{name}: {QUESTION}"}],
            "max_tokens": 9,
        }
        url = f"http://{podman.address(name)}:8000/v1/chat/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=PATIENCE_S).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"]
        kv = answer["usage"]["kvrail"]
        assert kv["prefill_worker"] == f"{podman.address(*pods['prefill'])}:7001"
        assert kv["transport"] == "tcp" and kv["kv_bytes"] > 0


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_pod_is_confined(podman, pods, role):
    for name in pods[role]:
        container = f"{name}-{role}"
        assert podman("exec", container, "id", "-u").strip() == "10001"
        refused = podman.run("exec", container, "touch", "/file")
        assert refused.returncode and "Read-only file system" in refused.stderr
        status = podman("exec", container, "cat", "/proc/1/status")
        assert int(re.search(r"CapEff:\s+(\w+)", status)[1], 16) == 0
        assert re.search(r"NoNewPrivs:\s+(\w+)", status)[1] == "1"
