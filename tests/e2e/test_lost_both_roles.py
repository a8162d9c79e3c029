"""Workers of both roles, killed or stopped in either of them under TLS: the client's stream goes on."""

import signal
import time

import pytest

from kvrail.config.origins import flag_name
from tests.certificates import Authority
from tests.e2e.processes import Processes
from tests.e2e.test_lost_workers import BODY, BRIEF, prefilled_by, whole  # noqa: F401  a fixture
from tests.models import kv_gib, tiny_model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The router knows two of the workers as prefill workers and two as decode workers."""
    model, authority = tiny_model("llama"), Authority(tmp_path_factory.mktemp("ca"))
    worker, router = (
        [part for name, path in authority.write(role).items() for part in (flag_name(name), path)]
        for role in ("worker", "router")
    )
    flags = ("--kv-dtype", "float32", "--kv-memory-gib", str(kv_gib(model, 64, "float32")), "--no-prefix-cache")
    folder = tmp_path_factory.mktemp("both")
    started = Processes(folder, model, *flags, *worker, both=True, router=tuple(router))
    yield started
    started.close()


def test_stopped_while_it_decodes_and_back_again(cluster, whole):  # noqa: F811
    stopped = []

    def stop():
        stopped.append(cluster.busy_decode())
        cluster.signal(stopped[0], signal.SIGSTOP)

    assert cluster.stream(BODY, after=40, then=stop) == whole
    cluster.signal(stopped[0], signal.SIGCONT)
    deadline = time.monotonic() + 60
    while cluster.states()[stopped[0]] != "healthy":
        assert time.monotonic() < deadline, cluster.states()
        time.sleep(0.2)


def test_killed_while_it_decodes(cluster, whole):  # noqa: F811
    assert cluster.stream(BODY, after=40, then=lambda: cluster.kill(cluster.busy_decode())) == whole


@pytest.mark.parametrize("what", ["stopped", "killed"])
def test_gone_while_it_prefills(cluster, what):
    """A prompt that it was to compute is computed by another, then by the worker that decodes."""
    before = cluster.stream(BRIEF)
    gone = prefilled_by(cluster)
    assert gone in cluster.prefills
    cluster.signal(gone, signal.SIGSTOP if what == "stopped" else signal.SIGKILL)
    assert cluster.stream(BRIEF) == before
