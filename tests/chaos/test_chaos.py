"""Clients of a cluster whose workers are killed, stopped and cut off get their answers, token by token as ever."""

import itertools
import json
import os
import subprocess

import pytest

from tests.chaos.faults import BOTH, SCENARIOS
from tests.chaos.ground import laid
from tests.forked import Forked
from tests.models import tiny_model

REQUESTS = int(os.environ.get("KVRAIL_CHAOS_REQUESTS", "40"))
WORKERS = 4
FILES_OF_CONNECTIONS = 8
"""Descriptors that a process may hold besides: connections of clients that have just gone, of workers that came."""
MOST_GROWTH_MIB = 250
"""Of a process's memory: what the first requests of each kind set up, and oneDNN's kernels for prompts of every length,
of which it keeps 1,024 (docs/failures.md)."""
NO_LOSS = ("upgrades", "slow links")
"""Scenarios in which nothing is broken: every request is answered in full."""
chaos = pytest.mark.chaos


ALWAYS = ("everything", BOTH)
"""Scenarios of `make test`; the others are those of `make chaos`."""
IN_ONE_MACHINE = ("kills", "prefill kills", "stops", "upgrades", BOTH)
"""Scenarios in which no link is harmed: UCX finds a way between processes of one machine that passes none."""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *(pytest.param(name, "tcp", marks=() if name in ALWAYS else chaos) for name in SCENARIOS),
        *(pytest.param(name, "ucx", marks=chaos) for name in IN_ONE_MACHINE),
    ],
)
def test_clients_notice_nothing(name, transport, tmp_path):
    try:
        with laid(WORKERS) as ground:
            flags = {
                "--hub": ground.hub,
                "--workers": ",".join(ground.workers),
                "--models": f"{tiny_model('llama')},{tiny_model('llama', seed=1)}",
                "--folder": str(tmp_path),
                "--requests": str(REQUESTS),
            }
            arguments, log = [name, transport, *itertools.chain(*flags.items())], tmp_path / "storm.log"
            done = Forked(arguments, log, "tests.chaos.storm", namespace=ground.hub).wait()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        assert not os.environ.get("CI"), error
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    if done:
        pytest.fail("\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.iterdir())))
    report = json.loads(log.read_text().splitlines()[-1])
    print(name, transport, report["outcomes"], len(report["faults"]), "faults; held", report["held"])  # noqa: T201
    print(*report["details"], sep="\n")  # noqa: T201
    assert report["faults"], "nothing befell the cluster"
    assert set(report["outcomes"]) <= {"full", "refused"}, report  # none wrong, none hung, no improper error
    requests = sum(report["outcomes"].values())
    # A request moves twice at most, so three faults in its way refuse it: few do, and of few requests one or two.
    most = 0 if name in NO_LOSS else max(2, requests // 100)
    assert requests - report["outcomes"]["full"] <= most, report
    for process, ((files, memory), (files_after, memory_after)) in report["held"].items():
        assert files_after <= files + FILES_OF_CONNECTIONS, (process, report)
        assert memory_after <= memory + MOST_GROWTH_MIB, (process, report)
