"""The benchmark of progressive delivery, with imposed acceptance, from its command line to its files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPOSED = 3
LIMIT_S = 270
SMALL = {f"KVRAIL_{role}_KV_MEMORY_GIB": "0.5" for role in ("PREFILL", "DECODE")}
"""Other tests' clusters run beside this one."""
FLAGS = ("--rates", "20mbit", "--tokens", "1000", "--rounds", "1", "--codecs", "raw,splitzip-progressive-ans")


@pytest.mark.heavy
def test_a_run_imposes_what_it_says(tmp_path):
    command = [sys.executable, "-m", "benchmarks.progressive", *FLAGS, "--acceptance", str(IMPOSED), "--out", tmp_path]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | SMALL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as late:  # what it has said tells how far it came
        pytest.fail(f"{(late.stdout or b'').decode()}{(late.stderr or b'').decode()}")
    if done.stdout.startswith("skipped"):
        assert not os.environ.get("CI"), done.stdout
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("progressive-*-cpu.json")
    found = json.loads(path.read_text())
    assert found["command"] == f"python -m benchmarks.progressive {' '.join(FLAGS)} --acceptance {IMPOSED}"
    times, *_ = found["tables"]
    raw, staged = (dict(zip(times["header"], row, strict=True)) for row in times["rows"])
    assert (raw["same text"], staged["same text"]) == ("1 of 1", "")
    assert 0 < float(staged["accepted"]) == min(IMPOSED, float(staged["drafts"]))
    assert f"splitzip-progressive-ans: {IMPOSED}" in times["notes"]
    assert times["notes"] in path.with_suffix(".md").read_text()
