"""What is forked behaves as the command that it stands for."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from kvrail import __version__
from tests.forked import ROOT, Forked, parsed


def test_its_output_and_status_are_the_commands(tmp_path):
    said, wrong = tmp_path / "said", tmp_path / "wrong"
    assert Forked(["--version"], said).wait(60) == 0 and said.read_text() == f"kvrail {__version__}\n"
    assert Forked(["decode", "--prt"], wrong).wait(60) == 2 and "unknown argument --prt" in wrong.read_text()


def test_its_environment_files_and_signals_are_its_own(tmp_path):
    """Two at once: neither sees the other's, nor what the tests have open."""
    with (tmp_path / "open").open("wb"):
        both = [
            Forked([tmp_path, number], tmp_path / number, "tests.own", {**os.environ, "OWN": number}) for number in "12"
        ]
        with pytest.raises(subprocess.TimeoutExpired):
            both[0].wait(0.01)
    for each in both:
        while not each.log.read_text().endswith(".\n"):
            assert each.poll() is None, each.log.read_text()
        assert psutil.Process(each.pid).num_fds() == 3
        each.send_signal(signal.SIGSTOP)
        each.send_signal(signal.SIGCONT)
    texts = [each.log.read_text() for each in both]
    assert [re.findall(r"OWN=(\d)", text) for text in texts] == [["1"], ["2"]]
    drawn = [re.findall(r"^drawn (.*)$", text, re.MULTILINE) for text in texts]
    assert len(drawn[0]) == 4 and not set(drawn[0]) & set(drawn[1])
    both[0].terminate()
    assert both[0].wait(60) == 7  # what it answers SIGTERM with
    both[1].kill()
    assert (both[1].wait(60), both[1].poll(), both[1].returncode) == (-signal.SIGKILL,) * 3
    both[1].kill()  # nothing more happens


def test_the_child_of_a_fork_ignores_what_an_interpreter_ignores(tmp_path):
    """subprocess gives a child's signals back to the system, and an interpreter takes some of them again."""
    environment, forked = {**os.environ, "OWN": "1"}, tmp_path / "forked"
    assert Forked(["child"], forked, "tests.own", environment).wait(300) == 0
    command = [sys.executable, "-m", "tests.own", "child"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
    wanted, found = (re.findall(r"SigIgn:\s+(\w+)", text) for text in (done.stdout, forked.read_text()))
    assert found == wanted and int(*found, 16) & 1 << signal.SIGPIPE - 1


@pytest.mark.parametrize(
    ("command", "wanted"),
    [
        ([sys.executable, "-m", "kvrail", "up"], ("", "kvrail", ["up"])),
        ([sys.executable, "-u", "-P", "-m", "kvrail", "-u"], ("", "kvrail", ["-u"])),
        (["ip", "netns", "exec", "a", sys.executable, "-m", "kvrail"], ("a", "kvrail", [])),
        ([sys.executable, "-c", "pass"], ("", "", [])),
        (["nvidia-smi"], ("", "", [])),
        (["ip", "netns", "exec", "a", "true"], ("", "", [])),
    ],
)
def test_what_is_forked_in_place_of_a_command(command, wanted):
    assert parsed(command) == wanted
