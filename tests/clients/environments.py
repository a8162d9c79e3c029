"""Where clients are installed: each in a place of its own, since some forbid what others need."""

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PLACE = Path(sys.prefix) / "client-environments"
"""Beside the tests' own packages; `make clean` takes it along."""
WITHOUT_GPU = Path(__file__).parents[2] / "constraints-cpu.txt"
"""No client computes: what needs torch gets the small one."""
PYTHON: dict[str, tuple[str, ...]] = {
    "litellm": ("litellm>=1.80", "mcp"),
    "langchain": ("langchain-openai>=1.0",),
    "llm": ("llm>=0.30",),
    "guidellm": ("guidellm>=0.8",),
    "llm_comply": ("llm-comply>=0.5",),
}
NODE = {
    "@ai-sdk/anthropic": "^4.0.0",
    "@ai-sdk/openai": "^4.0.0",
    "@ai-sdk/openai-compatible": "^3.0.0",
    "@anthropic-ai/sdk": "^1.0.0",
    "ai": "^7.0.0",
    "compatcanary": "^0.2.0",
    "openai": "^7.0.0",
}


def python_with(client: str) -> str:
    """An interpreter that has the client, installed first where it is not."""
    needs = PYTHON[client]
    folder = PLACE / f"{client}-{hashlib.sha256(repr(needs).encode()).hexdigest()[:8]}"
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", str(WITHOUT_GPU), *needs], check=True)
        (folder / "done").touch()
    return str(python)


def node_with_clients() -> tuple[str, Path]:
    """Node, and a folder that has all clients for it, installed first where they are not."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node and npm, "these clients need node and npm, 20 or later; install them"
    needs = [f"{name}@{version}" for name, version in NODE.items()]
    folder = PLACE / f"node-{hashlib.sha256(repr(needs).encode()).hexdigest()[:8]}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund", *needs], cwd=folder, check=True)
        (folder / "done").touch()
    return node, folder
