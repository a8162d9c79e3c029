import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_what_the_protos_generate(tmp_path):
    env = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts" / "protos.sh", tmp_path], check=True, env=env)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "kvrail/wire/v1").iterdir()}
    committed = ROOT / "kvrail/wire/v1"
    names = {path.name for path in committed.iterdir() if path.is_file() and path.name != "__init__.py"}
    assert set(fresh) == names
    for name, text in fresh.items():
        assert (committed / name).read_bytes() == text, f"{name} is stale; run scripts/protos.sh"
