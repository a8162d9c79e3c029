"""kvrail's processes, forked from one that has imported what a worker needs: which takes most of a worker's start.

A process that is one of these forks in turn what it starts of kvrail by `subprocess`: the children of `kvrail up`.
"""

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tests import children

ROOT = Path(__file__).parents[1]
MODULE = "kvrail"
DIE_WITH_PARENT = 1
"""Linux's PR_SET_PDEATHSIG."""
NETWORK = 0x40000000
"""Linux's CLONE_NEWNET."""
ENTER = ("ip", "netns", "exec")
INTERPRETER_FLAGS = ("-u", "-P")
"""A fork's output is unbuffered and its working folder not on its path, whether or not it is asked for."""


class Forked:
    """A process in which `python -m MODULE ARGUMENTS` runs, with what tests use of subprocess.Popen's interface."""

    def __init__(
        self,
        arguments: Sequence[object],
        log: Path,
        module: str = MODULE,
        environment: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> None:
        """log: what it writes is added there. environment: all of it, None: the tests'. namespace: of its network."""
        self.log = log
        log.open("ab").close()
        context = children.context()
        told = (module, list(map(str, arguments)), str(log), dict(environment or os.environ), namespace)
        self._process = context.Process(target=_main, args=told, daemon=True)  # type: ignore[attr-defined]
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        pid: int = self._process.pid
        return pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative: the signal that ended it; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if (code := self.returncode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return code


class ForkingPopen(subprocess.Popen):
    """Forks this process where a module of Python is to be run, with the environment and files that are asked for."""

    def __init__(self, args: Sequence[object], **options) -> None:
        namespace, module, arguments = parsed(list(map(str, args)))
        if module:
            environment, kept = options.get("env") or os.environ, options.get("pass_fds", ())

            def run() -> None:  # between fork and exec, which never comes
                _close_all_but(kept)
                _end_as(module, arguments, dict(environment), namespace)

            options["preexec_fn"] = run
        super().__init__(args, **options)


def parsed(command: list[str]) -> tuple[str, str, list[str]]:
    """Network namespace ("": this one), module and arguments of `python -m MODULE`; no module: another command."""
    namespace = ""
    if tuple(command[:3]) == ENTER:
        namespace, command = command[3], command[4:]
    interpreter, *rest = command
    while rest and rest[0] in INTERPRETER_FLAGS:
        rest.pop(0)
    if interpreter != sys.executable or rest[:1] != ["-m"]:
        return "", "", []
    return namespace, rest[1], rest[2:]


def _main(module: str, arguments: list[str], log: str, environment: dict[str, str], namespace: str) -> None:
    """What a process of the fork server does."""
    if multiprocessing.get_start_method() == "forkserver":  # whose end is the tests' end
        _libc().prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, descriptor in enumerate((nothing, out, out)):
        os.dup2(descriptor, number)
    _close_all_but(())
    os.chdir(ROOT)
    subprocess.Popen = ForkingPopen
    _end_as(module, arguments, environment, namespace)


def _close_all_but(kept: Collection[int]) -> None:
    """Close this process's files, but for the three standard ones."""
    edges = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(edges):
        os.closerange(before + 1, after)


def _end_as(module: str, arguments: list[str], environment: dict[str, str], namespace: str) -> None:
    """Run a module as the interpreter would, with its first state of signals and random numbers, and end with it."""
    status: object = 1
    try:
        gc.freeze()  # objects of the process before may close files that are others by now
        gc.enable()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which subprocess has restored
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if namespace:
            _enter(namespace)
        os.environ.clear()
        os.environ.update(environment)
        if threads := environment.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))
        random.seed()
        np.random.seed()
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        if isinstance(status, str):
            sys.stderr.write(f"{status}\n")
        sys.stdout.flush()
        os._exit(status if isinstance(status, int) else int(status is not None))


def _enter(namespace: str) -> None:
    """Into a network namespace of iproute2's. Raises OSError."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        if _libc().setns(file.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into {namespace}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
