"""The import laws of pyproject.toml: each can be broken, and is then seen."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
BREACHES = [
    ("imports point down", "kvrail/rpc/breach.py", "import kvrail.cli"),
    ("imports point down", "kvrail/codec/breach.py", "import kvrail.errors"),
    ("imports point down", "kvrail/services/decode/breach.py", "from kvrail.cli import flags"),
    ("imports point down", "kvrail/transfer/breach.py", "import kvrail.engine.kv.pages"),
    ("imports point down", "kvrail/breach.py", ""),  # a module that no layer has
    ("the engine's rooms point down", "kvrail/engine/kv/breach.py", "import kvrail.engine.request.events"),
    ("the engine's rooms point down", "kvrail/engine/schedule/breach.py", "import kvrail.engine.sampling.sampler"),
    ("the engine's rooms point down", "kvrail/engine/model/breach.py", "import kvrail.engine.sampling.masks"),
    ("the engine's rooms point down", "kvrail/engine/breach.py", ""),
    ("forms of pages stand below the pool", "kvrail/engine/kv/breach.py", ""),
    ("the router's rooms point down", "kvrail/services/router/plan/breach.py", "import kvrail.services.router.fleet"),
    ("the router's rooms point down", "kvrail/services/router/answer/breach.py", "import kvrail.services.router.http"),
    ("the router's rooms point down", "kvrail/services/router/breach.py", ""),
    (
        "a codec imports core and base alone",
        "kvrail/codec/integer/breach.py",
        "import kvrail.codec.splitzip.tiles.plan",
    ),
    (
        "codecs of papers do not import each other",
        "kvrail/codec/papers/tbe/breach.py",
        "import kvrail.codec.papers.lynx",
    ),
    ("a codec imports core and base alone", "kvrail/codec/raw/breach.py", "import kvrail.codec.frame"),
    ("a codec imports core and base alone", "kvrail/codec/core/breach.py", "import kvrail.codec.raw.codec"),
    (
        "forms of splitzip share tiles; entropy and progressive_ans wrap another form",
        "kvrail/codec/splitzip/tiles/breach.py",
        "import kvrail.codec.splitzip.one_stage.plan",
    ),
    ("below the workers only a transfer knows codecs", "kvrail/engine/kv/breach.py", "import kvrail.codec.base"),
    (
        "a transfer knows pages, codecs and transports: no engine, metrics or messages",
        "kvrail/transfer/breach.py",
        "import kvrail.telemetry.moments",
    ),
    (
        "a transfer knows pages, codecs and transports: no engine, metrics or messages",
        "kvrail/kv/breach.py",
        "import kvrail.config.settings",
    ),
    ("transports know payloads alone", "kvrail/transport/breach.py", "import kvrail.telemetry.spans"),
    (
        "services and tools never import each other",
        "kvrail/services/prefill/breach.py",
        "import kvrail.services.decode.servicer",
    ),
    ("services point down", "kvrail/services/decode/breach.py", "import kvrail.services.worker.main"),
    ("services and tools never import each other", "kvrail/tools/pack/breach.py", "import kvrail.tools.calibrate.main"),
    (
        "what to compute is decided without torch",
        "kvrail/engine/schedule/breach.py",
        "import kvrail.engine.kv.cache",
    ),
    (
        "the router and the command line never reach torch",
        "kvrail/services/router/plan/breach.py",
        "import kvrail.text.breach",
    ),
]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the packages and of the laws."""
    copy = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(ROOT / "kvrail", copy / "kvrail", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def broken_laws(house):
    """What is told of each law that is broken."""
    done = subprocess.run(LINT, cwd=house, capture_output=True, text=True, env={"PYTHONPATH": ".", "COLUMNS": "200"})
    names = [contract["name"] for contract in contracts()]
    assert all(f"{name} KEPT" in done.stdout or f"{name} BROKEN" in done.stdout for name in names), done
    told = done.stdout.partition("\nBroken contracts\n")[2]
    found = {name: told.partition(f"\n{name}\n---")[2] for name in names if f"{name} BROKEN" in done.stdout}
    return {name: re.split(r"\n[^\n]+\n-{9,}\n", text)[0] for name, text in found.items()}


def contracts():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_every_law_has_a_breach_here():
    assert {contract["name"] for contract in contracts()} == {law for law, _, _ in BREACHES}


def test_the_house_keeps_its_laws(house):
    assert broken_laws(house) == {}


@pytest.fixture(scope="module")
def seen(house):
    """By path and line, the laws that each breach is told to break; as many are made at once as have files."""
    left, found = list(BREACHES), {}
    while left:
        at_once = {path: (law, path, line) for law, path, line in reversed(left)}
        left = [each for each in left if each not in at_once.values()]
        added = {house / "kvrail/text/breach.py": "import torch"}
        added |= {house / path: line for path, (_, _, line) in at_once.items()}
        for file, text in added.items():
            file.write_text(f"{text}\n")
        told = broken_laws(house)
        for _, path, line in at_once.values():
            module = path.removesuffix(".py").replace("/", ".")
            found[path, line] = [law for law, text in told.items() if re.search(rf"\b{re.escape(module)}\b", text)]
        for file in added:
            file.unlink()
    return found


@pytest.mark.parametrize(("law", "path", "line"), BREACHES)
def test_a_breach_is_seen(seen, law, path, line):
    assert law in seen[path, line]
