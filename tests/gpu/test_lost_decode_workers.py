"""Decode workers killed in the middle of answers, on a GPU in bfloat16: every answer is that of an undisturbed run."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from benchmarks.codec_data import DEMO  # noqa: E402
from tests.e2e.processes import Processes  # noqa: E402
from tests.progressive.test_same_output import prompts  # noqa: E402

PROMPTS = 8
TOKENS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    flags = ("--device", "cuda", "--kv-memory-gib", "0.3", "--max-batch-tokens", "512", "--max-running", "32")
    started = Processes(tmp_path_factory.mktemp("lost"), DEMO, *flags, prefills=1, decodes=4)
    yield started
    started.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "sampled"])
def test_answers_are_those_of_an_undisturbed_run(cluster, options):
    bodies = [
        {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **options}
        for prompt in prompts(PROMPTS)
    ]
    assert cluster.ask({**bodies[0], "max_tokens": 2})["usage"]["kvrail"]["invariant"]
    whole = [cluster.stream(body) for body in bodies]
    reached = threading.Barrier(PROMPTS + 1)

    def disturbed(body):
        return cluster.stream(body, after=TOKENS // 20, then=reached.wait)

    with ThreadPoolExecutor(PROMPTS) as pool:
        answers = [pool.submit(disturbed, body) for body in bodies]
        reached.wait(60)
        before = moves(cluster)
        cluster.kill(cluster.busy_decode())
        found = [answer.result() for answer in answers]
    assert moves(cluster) > before
    assert found == whole
    time.sleep(1)


def moves(cluster):
    page = httpx.get(f"{cluster.url}/metrics").text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("kvrail_failovers_total"))
