"""lm-eval, an evaluation: a task of its own making, whose answers' log probabilities the server gives."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = [{"question": "What is grep?"}, {"question": "What is a pipe?"}]
TASK = """
task: shell
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["It is a program.", "Blue."]
doc_to_target: 0
metric_list: [{metric: acc}]
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "shell.yaml").write_text(TASK.replace("QUESTIONS", str(questions)))
    model = {
        "model": os.environ["MODEL"],
        "base_url": f"{os.environ['BASE_URL']}/v1/completions",
        "tokenizer": os.environ["MODEL_FOLDER"],
        "num_concurrent": "2",
        "tokenized_requests": "True",
    }
    options = {
        "model": "local-completions",
        "model_args": ",".join(f"{name}={value}" for name, value in model.items()),
        "tasks": "shell",
        "include_path": str(folder),
        "output_path": str(folder / "report"),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    env = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run([str(Path(sys.executable).with_name("lm_eval")), *flags, "--log_samples"], check=True, env=env)
    (report,) = (folder / "report").rglob("results_*.json")
    assert 0 <= json.loads(report.read_text())["results"]["shell"]["acc,none"] <= 1, report.read_text()
    (samples,) = (folder / "report").rglob("samples_shell_*.jsonl")
    scored = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert len(scored) == len(QUESTIONS)
    for (first, _), (second, _) in scored:
        assert float(first) < 0 and float(second) < 0 and first != second, scored
