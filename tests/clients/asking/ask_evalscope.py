"""evalscope perf, a load generator: a few requests, none of which fails, and a report in which each number is there."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ASKED, TOKENS = 6, 8

with tempfile.TemporaryDirectory() as folder:
    options = {
        "url": f"{os.environ['BASE_URL']}/v1/chat/completions",
        "model": os.environ["MODEL"],
        "api": "openai",
        "dataset": "random",
        "tokenizer-path": os.environ["MODEL_FOLDER"],
        "number": ASKED,
        "parallel": 2,
        "min-prompt-length": 16,
        "max-prompt-length": 32,
        "min-tokens": TOKENS,
        "max-tokens": TOKENS,
        "outputs-dir": folder,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    program = str(Path(sys.executable).with_name("evalscope"))
    subprocess.run([program, "perf", *flags], check=True, env={**os.environ, "HOME": folder})
    (report,) = Path(folder).rglob("benchmark_summary.json")
    found = json.loads(report.read_text())
    assert (found["Success Requests"], found["Failed Requests"], found["Stream Requests"]) == (ASKED, 0, ASKED), found
    assert found["Avg Output Tokens"] == TOKENS, found
    for name in ("Avg Latency (s)", "Avg Input Tokens", "Avg TTFT (ms)", "Avg TPOT (ms)", "Avg ITL (ms)"):
        assert found[name] > 0, (name, found)
