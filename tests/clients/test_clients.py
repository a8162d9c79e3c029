"""Clients, each by a script of its own in a process of its own, against a live cluster with the model that ships.

A script prints the objects that its client made of answers; here they are validated against the schema asked for.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.clients.environments import LARGE, node_with_clients, python_with
from tests.e2e.cluster import MODEL, ROOT, Cluster

ASKING = Path(__file__).with_name("asking")
WANTED = ASKING / "wanted.json"
LIMIT_S = 600


def run(cluster: Cluster, command: list[str], cwd: Path = ROOT, objects: int = 0) -> str:
    """What a command says that must end well; objects: how many it must show."""
    told = {"BASE_URL": cluster.url, "MODEL": MODEL, "MODEL_FOLDER": str(ROOT / "models" / MODEL)}
    told |= {"OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "true", "HF_HUB_OFFLINE": "1"}
    told["WANTED"] = str(WANTED)
    done = subprocess.run(command, env={**os.environ, **told}, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    shown = [json.loads(line) for line in re.findall(r"^object: (.*)$", done.stdout, re.MULTILINE)]
    assert len(shown) == objects, done.stdout
    for each in shown:
        jsonschema.validate(each, json.loads(WANTED.read_text()))
    return done.stdout


@pytest.mark.parametrize(("client", "objects"), [("openai", 5), ("anthropic", 0)])
def test_official_clients(cluster: Cluster, client: str, objects: int):
    run(cluster, [sys.executable, str(ASKING / f"ask_{client}.py")], objects=objects)


@pytest.mark.clients
@pytest.mark.parametrize(
    ("client", "objects"),
    [("litellm", 0), ("langchain", 2), ("llm", 0), ("instructor", 3), ("pydantic_ai", 2)],
)
def test_python(cluster: Cluster, client: str, objects: int):
    run(cluster, [python_with(client), str(ASKING / f"ask_{client}.py")], objects=objects)


@pytest.mark.clients
@pytest.mark.parametrize(
    "generator",
    ["aiperf", "evalscope", "guidellm", pytest.param("lm_eval", marks=pytest.mark.heavy), "sglang", "vllm"],
)
def test_load_generators_and_evaluations(cluster: Cluster, generator: str):
    """Each asks a few times: no request fails, and its own report is full."""
    if generator in LARGE and os.environ.get("CI"):
        pytest.skip(f"{generator} is gigabytes to fetch; `make test-clients` has it")
    run(cluster, [python_with(generator), str(ASKING / f"ask_{generator}.py")])


@pytest.mark.clients
@pytest.mark.parametrize(("client", "objects"), [("openai", 4), ("anthropic", 0), ("ai", 3)])
def test_node(cluster: Cluster, client: str, objects: int):
    node, folder = node_with_clients()
    script = Path(shutil.copy(ASKING / f"ask_{client}.mjs", folder))  # beside the packages, where node looks for them
    run(cluster, [node, script.name], folder, objects)


@pytest.mark.clients
def test_compatcanary(cluster: Cluster):
    node, folder = node_with_clients()
    command = [node, "node_modules/.bin/compatcanary", "scan", "--fail-on", "never"]
    said = run(cluster, [*command, "--base-url", f"{cluster.url}/v1", "--model", MODEL], folder)
    assert "Score: 100/100" in said, said


@pytest.mark.clients
@pytest.mark.parametrize(
    "api", ["openai-chat", *(pytest.param(api, marks=pytest.mark.heavy) for api in ("open-responses", "anthropic"))]
)
def test_llm_comply(cluster: Cluster, api: str):
    """All of its suite, but for images, which are refused by name, and a request without a model, which is served."""
    comply = str(Path(python_with("llm_comply")).with_name("llm-comply"))
    command = [comply, "-u", f"{cluster.url}/v1", "-k", "none", "-m", MODEL, "--format", api]
    command += ["--timeout", str(LIMIT_S // 2)]  # each request's: a slow machine is not a fault
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    failed = re.findall(r"[❌✗] (.+?) \(", done.stdout)  # it writes either mark
    if "expected 'tool_use', got 'max_tokens'" in done.stdout:  # the small model may call on and on
        failed.remove("Tool Calling")
    assert failed == ["Image Input", *(["Error Handling"] if api != "anthropic" else [])], done.stdout
    assert re.search(r"[❌✗] Image Input .*\n +└─ HTTP 400", done.stdout), done.stdout
