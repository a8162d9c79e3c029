"""The command `llm`, with a model of its own configuration file."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {os.environ['MODEL']}\n  api_base: {os.environ['BASE_URL']}/v1\n"
    )
    command = [
        str(Path(sys.executable).with_name("llm")),
        "-m",
        "ours",
        "-o",
        "temperature",
        "0",
        "-o",
        "max_tokens",
        "24",
    ]
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    told = [
        subprocess.run([*command, *flags, "What is grep?"], env=environment, capture_output=True, text=True, check=True)
        for flags in ([], ["--no-stream"])
    ]
    assert told[0].stdout.strip() and told[0].stdout == told[1].stdout
