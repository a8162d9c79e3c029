"""Processes that are started, kept and ended together.

    start ──► all healthy ──► stop asked for ──► router drains ──► workers drain ──► all gone
      │            │ ▲
      │            └─┴ one ended: it is restarted
      └────────────┴──► one ended too early or too often, or the time to start is over ──► all stop, status 1

Children lead process groups of their own, so a Ctrl-C in the terminal reaches the supervisor alone, which then stops
them in order. A pipe closes when the supervisor itself is gone (kvrail.cli.cluster.watch).
"""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import httpx

from kvrail.cli.cluster.output import Output
from kvrail.cli.cluster.plan import Process
from kvrail.cli.cluster.watch import WATCH_VARIABLE
from kvrail.errors import KvrailError

HEALTH_INTERVAL_S = 0.2
TAIL_LINES = 20
SAME_SIGNAL_S = 0.5
"""A signal that follows sooner is the same one: timeout(1) and make pass on what the terminal has sent already."""
READ_MARGIN_S = 2.0
"""Seconds to read the last lines; a process that left its group may hold a child's output open for ever."""
QUIET_S = 3.0
"""While processes start, after this many seconds without a line, one names those that are not ready."""
STEADY_S = 60.0
"""A process that ran for longer has not failed at its start: its earlier ends no longer count."""
MOST_PAUSE_S = 10.0
"""Longest pause before a restart; the first restart is immediate."""
KILL_MARGIN_S = 10.0
"""Longer than kvrail.cli.cluster.watch.EXIT_MARGIN_S: a slow child ends by itself first."""


class ClusterError(KvrailError):
    """A process of the cluster ended, or did not become healthy."""


@dataclass(slots=True)
class Child:
    """A running process, the end of its log, and the tasks that read it."""

    plan: Process
    process: asyncio.subprocess.Process
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    reader: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    def signal_group(self, number: int) -> None:
        """Send `number` to the process and to what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Supervisor:
    """Starts processes, waits until they are healthy, restarts those that exit, and ends them all at a signal.

    restarts: times in a row that a process may end shortly after its start; once more, and all are ended.
    """

    def __init__(self, output: Output, *, startup_timeout_s: float, grace_period_s: float, restarts: int) -> None:
        self._output = output
        self._startup_timeout_s = startup_timeout_s
        self._grace_period_s = grace_period_s
        self._restarts = restarts
        self._children: list[Child] = []
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._stopped_at = 0.0

    async def run(self, processes: Sequence[Process], on_ready: Callable[[], None]) -> None:
        """Run `processes` until SIGINT, SIGTERM or SIGHUP; a second signal stops at once.

        Raises ClusterError where one is not healthy in time, or ends before that or too often after it. No process is
        left behind.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        read_end, write_end = os.pipe()
        try:
            for place, process in enumerate(processes):
                await self._start(place, process, read_end)
            stopped = await self._unless_stopped(self._until_healthy())
            if not stopped:
                on_ready()
                await self._unless_stopped(self._keep_all(read_end))
        finally:
            await self._end_all()
            os.close(read_end)
            os.close(write_end)
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        now = asyncio.get_running_loop().time()
        if not self._stop.is_set():
            self._stopped_at = now
            self._output.say("stopping; once more to stop at once")
            self._stop.set()
        elif now - self._stopped_at > SAME_SIGNAL_S:
            self._hurry.set()

    async def _start(self, place: int, plan: Process, read_end: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *plan.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **_import_path(), **plan.environment, WATCH_VARIABLE: str(read_end)},
            pass_fds=(read_end,),
            start_new_session=True,
        )
        child = Child(plan, process)
        child.reader = asyncio.create_task(self._read(child), name=f"log of {plan.name}")
        self._children[place : place + 1] = [child]

    async def _read(self, child: Child) -> None:
        """Pass the child's lines on, each with its name; a line of any length is taken."""
        stream = child.process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(child, line)
        if rest:
            self._line(child, rest)

    def _line(self, child: Child, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # a progress bar as it ended
        child.tail.append(text)
        try:
            self._output.line(child.plan.name, text)
        except BrokenPipeError:
            self._stop.set()

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> bool:
        """Do `work` until it ends or a signal comes; returns whether a signal came. Raises what `work` raises."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return self._stop.is_set()
        finally:
            for each in (task, stop):
                each.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _until_healthy(self) -> None:
        waiting = list(self._children)
        reporting = asyncio.create_task(self._report_while_quiet(lambda: waiting))
        try:
            async with asyncio.timeout(self._startup_timeout_s), _asking() as client:
                while waiting:
                    self._raise_if_ended()
                    waiting = [child for child in waiting if not await _healthy(client, child.plan.url)]
                    await asyncio.sleep(HEALTH_INTERVAL_S if waiting else 0)
        except TimeoutError:
            names = ", ".join(child.plan.name for child in waiting)
            raise ClusterError(
                f"{names}: not healthy after {self._startup_timeout_s:g} s; see the lines below, "
                f"or wait longer with --startup-timeout-s{_tails(waiting)}"
            ) from None
        finally:
            reporting.cancel()

    async def _report_while_quiet(self, waiting: Callable[[], Sequence[Child]]) -> None:
        """Name the processes that are not ready, when no line has been written for QUIET_S."""
        begin = monotonic()
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if self._output.quiet_s > QUIET_S:
                names = ", ".join(child.plan.name for child in waiting())
                self._output.say(f"starting: {names} not ready yet, {monotonic() - begin:.0f} s so far")

    async def _keep_all(self, read_end: int) -> None:
        """Restart processes that exit; raises ClusterError where one does so too often."""
        keepers = [asyncio.create_task(self._keep(place, read_end)) for place in range(len(self._children))]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                keeper.result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, place: int, read_end: int) -> None:
        """Keep one process, until a stop is asked for."""
        ends = 0
        while not self._stop.is_set():
            child, since = self._children[place], monotonic()
            # asyncio's own wait lasts as long as anything that the process has started holds its output.
            while child.alive:  # noqa: ASYNC110
                await asyncio.sleep(HEALTH_INTERVAL_S)
            await asyncio.sleep(HEALTH_INTERVAL_S)  # its last lines are still in the pipe
            ends = 1 if monotonic() - since > STEADY_S else ends + 1
            if ends > self._restarts:
                self._raise_if_ended()
            child.signal_group(signal.SIGKILL)  # what it has left behind
            pause_s = min(MOST_PAUSE_S, 2.0 ** (ends - 2)) if ends > 1 else 0.0
            when = f" in {pause_s:g} s" if pause_s else ""
            self._output.say(f"{child.plan.name} ended {_how(child.process.returncode)}; restarting{when}")
            await asyncio.sleep(pause_s)
            await self._start(place, child.plan, read_end)

    def _raise_if_ended(self) -> None:
        ended = [child for child in self._children if not child.alive]
        if ended and not self._stop.is_set():
            named = ", ".join(f"{child.plan.name} ended {_how(child.process.returncode)}" for child in ended)
            raise ClusterError(f"{named}; the others are stopped{_tails(ended)}")

    async def _end_all(self) -> None:
        """End the first process while the others still work for it, then the others; kill what does not end."""
        try:
            if all(child.alive for child in self._children):
                await self._end(self._children[:1])
            await self._end(self._children)
        finally:
            for child in self._children:
                child.signal_group(signal.SIGKILL)  # also what a child itself left behind
            await asyncio.gather(*(child.process.wait() for child in self._children))
            readers = [child.reader for child in self._children if child.reader]
            if readers:
                _, unread = await asyncio.wait(readers, timeout=READ_MARGIN_S)
                for reader in unread:
                    reader.cancel()

    async def _end(self, children: Sequence[Child]) -> None:
        """Send SIGTERM and wait for the end, for as long as draining may take, or until a second signal."""
        running = [child for child in children if child.alive]
        if not running:
            return
        for child in running:
            with suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        ends = asyncio.gather(*(child.process.wait() for child in running))
        hurry = asyncio.ensure_future(self._hurry.wait())
        timeout = self._grace_period_s + KILL_MARGIN_S
        await asyncio.wait((ends, hurry), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if not ends.done():
            ends.cancel()
            names = ", ".join(child.plan.name for child in running if child.alive)
            self._output.say(f"killing {names}: still running")
        await asyncio.gather(ends, hurry, return_exceptions=True)


def _asking() -> httpx.AsyncClient:
    """A client of our own children, on this machine: their certificates are for others."""
    return httpx.AsyncClient(trust_env=False, verify=False)


async def _healthy(client: httpx.AsyncClient, url: str) -> bool:
    """Whether a process serves and, where it is the router, has found every worker.

    A worker may serve for a second or two before the router knows; a prefill worker would be left out until then.
    """
    try:
        answer = await client.get(f"{url}/health", timeout=2.0)
    except httpx.TransportError:
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    about = answer.json() if answer.headers.get("content-type") == "application/json" else {}
    workers = [*about.get("prefill_workers", {}).values(), *about.get("decode_workers", {}).values()]
    return all(worker["state"] == "healthy" for worker in workers)


def _import_path() -> dict[str, str]:
    """PYTHONPATH by which a child finds this code where it is not installed but run from a checkout."""
    root = Path(__file__).resolve().parents[3]
    if root.name == "site-packages":
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"by {signal.Signals(-status).name}"
    return f"with status {status}"


def _tails(children: Sequence[Child]) -> str:
    lines = [f"  {child.plan.name}: {line}" for child in children for line in child.tail]
    return "".join(f"\n{line}" for line in lines)
