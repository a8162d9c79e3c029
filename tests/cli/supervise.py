"""Runs the supervisor over tests/cli/child.py: supervise.py NOTES GRACE TIMEOUT RESTARTS MODE:PORT…"""

import asyncio
import sys
from pathlib import Path

from kvrail.cli.cluster import supervisor
from kvrail.cli.cluster.output import Output
from kvrail.cli.cluster.plan import Process
from kvrail.errors import KvrailError

notes, grace, timeout, restarts, *children = sys.argv[1:]
supervisor.KILL_MARGIN_S = supervisor.QUIET_S = supervisor.MOST_PAUSE_S = 0.3
processes = []
for child in children:
    mode, port = child.split(":")
    command = (sys.executable, str(Path(__file__).with_name("child.py")), mode, port, notes)
    processes.append(Process(f"{mode}-{port}", command, f"http://127.0.0.1:{port}"))
output = Output(sys.stdout, prefix=True)
group = supervisor.Supervisor(
    output, startup_timeout_s=float(timeout), grace_period_s=float(grace), restarts=int(restarts)
)
try:
    asyncio.run(group.run(processes, lambda: output.say("READY")))
except KvrailError as error:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(1) from None
