"""guidellm, a load generator: a few requests, none of which fails."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen


def answered() -> float:
    """Requests that the router has answered in full."""
    with urlopen(os.environ["BASE_URL"].removesuffix("/v1") + "/metrics") as metrics:
        lines = [line.decode() for line in metrics if line.startswith(b"kvrail_requests_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="length"' in line)


before = answered()
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
    # Its processes may end before the last answer is counted: the router knows how many there were.
    assert totals["successful"] in (5, 6) and not totals["errored"] and not totals["incomplete"], totals
    assert answered() - before == 6, (before, answered(), totals)
