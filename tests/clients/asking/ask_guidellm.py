"""guidellm, a load generator: a few requests, none of which fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "report.json"
    options = {
        "backend": f"kind=openai_http,target={os.environ['BASE_URL']},model={os.environ['MODEL']}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=6",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "tokenizer": f"kind=hf_auto,model={os.environ['MODEL_FOLDER']}",
        "output": f"kind=json,path={out}",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    subprocess.run([str(Path(sys.executable).with_name("guidellm")), "run", *flags, "--disable-console"], check=True)
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals
