"""AIPerf, a load generator: a few requests, none of which fails, and a report in which each number is there."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ASKED, TOKENS = 6, 8
MODEL_FOLDER = Path(os.environ["MODEL_FOLDER"])

with tempfile.TemporaryDirectory() as folder:
    options = {
        "model": os.environ["MODEL"],
        "url": os.environ["BASE_URL"],
        "endpoint-type": "chat",
        "tokenizer": f"{MODEL_FOLDER.parent.name}/{MODEL_FOLDER.name}",  # a longer path is taken for no name
        "request-count": ASKED,
        "concurrency": 2,
        "synthetic-input-tokens-mean": 16,
        "output-tokens-mean": TOKENS,
        "artifact-dir": folder,
        "ui": "none",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # it would look in the cache
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *flags, "--streaming"]
    subprocess.run(command, check=True, cwd=MODEL_FOLDER.parents[1], env=env)
    report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == ASKED, report["request_count"]
    assert not report.get("error_summary"), report["error_summary"]
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "output_sequence_length"):
        assert report[name]["avg"] > 0, (name, report[name])
