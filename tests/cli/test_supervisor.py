"""Processes that are kept together: those that exit are restarted, and in the end nothing is left behind."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0


def wait_until(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Group:
    """The supervisor in a process of its own, over children of the given modes."""

    def __init__(self, tmp_path, *modes, grace=5.0, timeout=20.0, restarts=0):
        self.notes = tmp_path / "notes"
        self.notes.touch()
        self.log = tmp_path / "log"
        self.ports = free_ports(len(modes))
        children = [f"{mode}:{port}" for mode, port in zip(modes, self.ports, strict=True)]
        self._file = self.log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "tests/cli/supervise.py", self.notes, *map(str, (grace, timeout, restarts)), *children],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=self._file,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self):
        return [int(pid) for pid in re.findall(r"pid (\d+)", self.notes.read_text())]

    def ready(self):
        wait_until(lambda: b"READY" in self.log.read_bytes() or self.process.poll() is not None, "not ready")
        assert self.process.poll() is None, self.process.stderr.read()
        return self

    def end(self):
        """Status and standard error once the supervisor is gone."""
        _, error = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, error

    def all_gone(self):
        assert self.pids()
        wait_until(lambda: not any(map(alive, self.pids())), "a process is left behind")


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def free_ports(count):
    """Ports below those of outgoing connections: they stay free until the children have started."""
    ports = []
    while len(ports) < count:
        port = random.randrange(10_000, 20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


@pytest.fixture
def group(tmp_path):
    made = []

    def make(*modes, **options):
        made.append(Group(tmp_path, *modes, **options))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.wait()
        for pid in each.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_all_in_order_and_is_a_success(group, number):
    running = group("steady", "steady", "steady").ready()
    running.process.send_signal(number)
    assert running.end()[0] == 0
    running.all_gone()
    stopped = re.findall(r"(\d+) got SIGTERM", running.notes.read_text())
    assert stopped[0] == str(running.ports[0])  # the router drains while its workers still serve
    assert sorted(stopped) == sorted(map(str, running.ports))  # and each is told once


def test_log_lines_carry_the_name_of_their_process_and_what_it_started_ends_too(group):
    running = group("steady", "parent").ready()
    assert len(running.pids()) == 3
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    running.all_gone()
    first, second = running.ports
    lines = running.log.read_text()
    assert f"steady-{first}| steady is up\n" in lines
    assert f"parent-{second}| parent is up\n" in lines
    assert "\x1b" not in lines


def test_a_death_stops_the_others_and_is_told_with_its_last_words(group):
    running = group("steady", "mortal", "steady").ready()
    with suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{running.ports[1]}/die")
    status, error = running.end()
    assert status == 1
    name = f"mortal-{running.ports[1]}"
    assert f"{name} ended with status 3" in error
    assert f"{name}: the last words" in error
    running.all_gone()


def test_a_child_that_is_killed_is_told_by_its_signal(group):
    running = group("steady", "steady").ready()
    os.kill(running.pids()[0], signal.SIGKILL)
    status, error = running.end()
    assert (status, "ended by SIGKILL" in error) == (1, True)
    running.all_gone()


def test_a_child_that_ends_is_started_anew_and_the_others_do_not_hear_of_it(group):
    running = group("steady", "parent", "steady", restarts=5).ready()
    _, port, _ = running.ports
    of_port = re.compile(rf"^{port} pid (\d+)", re.MULTILINE)

    def pids() -> list[int]:
        return list(map(int, of_port.findall(running.notes.read_text())))

    for turn in range(1, 3):
        before = pids()
        os.kill(before[-2], signal.SIGKILL)
        wait_until(lambda wanted=2 * (turn + 1): len(pids()) == wanted, "not restarted")
        wait_until(lambda gone=before: not any(map(alive, gone)), "what it has started is left behind")
    assert running.log.read_text().count(f"parent-{port} ended by SIGKILL; restarting") == 2
    assert all(map(alive, running.pids()[-2:]))
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    assert len(re.findall("got SIGTERM", running.notes.read_text())) == 3
    running.all_gone()


def test_a_child_that_ends_again_and_again_stops_all(group):
    running = group("steady", "mortal", restarts=2).ready()
    port = running.ports[1]
    while running.process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/die", timeout=1)
    status, error = running.end()
    assert (status, f"mortal-{port} ended with status 3; the others are stopped" in error) == (1, True)
    assert f"mortal-{port}: the last words" in error
    log = running.log.read_text()
    assert log.count(f"mortal-{port} ended with status 3; restarting\n") == 1  # at once, then after a pause
    assert log.count(f"mortal-{port} ended with status 3; restarting in 0.3 s") == 1
    running.all_gone()


def test_a_death_before_all_are_healthy(group):
    running = group("sick", "steady", restarts=5)
    wait_until(lambda: len(running.pids()) == 2, "children did not start")
    os.kill(running.pids()[0], signal.SIGKILL)
    status, error = running.end()
    assert (status, "ended by SIGKILL" in error) == (1, True)
    assert b"READY" not in running.log.read_bytes()
    running.all_gone()


def test_a_child_that_never_gets_healthy(group):
    running = group("steady", "sick", timeout=2.0)
    status, error = running.end()
    assert status == 1
    assert f"sick-{running.ports[1]}: not healthy after 2 s" in error
    assert "sick is up" in error
    assert f"starting: sick-{running.ports[1]} not ready yet, " in running.log.read_text()  # who waits is told why
    assert f"steady-{running.ports[0]}" not in error
    running.all_gone()


def test_a_router_that_misses_a_worker_is_waited_for(group):
    running = group("steady", "router", timeout=2.0)
    status, error = running.end()
    assert status == 1
    assert f"router-{running.ports[1]}: not healthy after 2 s" in error
    running.all_gone()


def test_a_signal_while_starting_stops_all(group):
    running = group("sick", "steady")
    wait_until(lambda: len(running.pids()) == 2, "children did not start")
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    running.all_gone()


def test_a_child_that_does_not_listen_is_killed_after_the_grace_period(group):
    running = group("deaf", "steady", grace=0.2).ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    assert f"killing deaf-{running.ports[0]}" in running.log.read_text()
    running.all_gone()


def test_a_second_signal_does_not_wait_for_the_grace_period(group):
    running = group("deaf", "steady", grace=10_000.0).ready()
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: "got SIGTERM" in running.notes.read_text(), "the child was not asked to end")
    time.sleep(1.0)
    running.process.send_signal(signal.SIGINT)
    assert running.end()[0] == 0
    assert f"killing deaf-{running.ports[0]}" in running.log.read_text()
    running.all_gone()


def test_a_signal_that_comes_twice_at_once_is_one(group):
    running = group("steady", "steady").ready()
    running.process.send_signal(signal.SIGINT)
    running.process.send_signal(signal.SIGTERM)
    assert running.end()[0] == 0
    assert "killing" not in running.log.read_text()
    assert len(re.findall("got SIGTERM", running.notes.read_text())) == 2
    running.all_gone()


@pytest.mark.parametrize("modes", [("steady", "steady"), ("deaf", "steady")])
def test_children_end_when_the_supervisor_is_killed(group, modes):
    running = group(*modes).ready()
    running.process.kill()
    running.process.wait()
    running.all_gone()


def test_children_end_when_the_supervisor_is_killed_while_they_start(group):
    running = group("sick", "sick")
    wait_until(lambda: len(running.pids()) == 2, "children did not start")
    running.process.kill()
    running.all_gone()
