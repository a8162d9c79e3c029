"""`kvrail up` on this machine for as long as a benchmark asks it, with the model that ships."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "kvrail-demo"


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """url: of the API. metrics: of each process, by its name."""

    url: str
    metrics: Mapping[str, str]


@contextmanager
def local_cluster(*flags: str, wait_s: float = 300) -> Iterator[LocalCluster]:
    """A cluster; everything ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "kvrail", "up", "--port", "0", "--kv-memory-gib", "0.5", *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + wait_s
            while "Ctrl-C stops the cluster" not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the cluster has not started:\n{log.read_text()}")
                time.sleep(0.2)
            text = log.read_text()
            found = re.search(r"kvrail chat --url (\S+)", text)
            assert found is not None
            names = re.findall(r"^  (router|prefill-\d|decode-\d) +(\S+/metrics)$", text, re.MULTILINE)
            yield LocalCluster(found[1], dict(names))
        finally:
            process.terminate()
            process.wait(60)
