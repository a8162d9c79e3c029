"""What Triton compiles for an H100, run on a CPU: launches over a CPU's tensors go to `emulator`.

The tests' process has Triton's interpreter in place of its compiler, so that `in_a_child` runs a function in another.
"""

import ast
import contextlib
import ctypes
import importlib
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.ptx.emulator import Program, run, run_by_turns
from tests.ptx.memory import Region

ROOT = Path(__file__).parents[2]
Edit = Callable[[str], str]


def in_a_child(function: Callable[..., object], *args: object, cache: Path) -> None:
    """Call a module's `function` where Triton compiles. Raises AssertionError where it fails.

    args: what `ast.literal_eval` reads; cache: a folder for what is compiled.
    """
    name, text = f"{function.__module__}:{function.__name__}", repr(args)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # nobody debugs it, and it takes a tenth of the time
    command = [sys.executable, "-m", "tests.ptx.compiled", name, text]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class H100:
    """What Triton asks of a driver to compile a kernel."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def compiling() -> Iterator[list[str]]:
    """Launches are compiled and do nothing; yields their kernels' names. In a process without Triton's interpreter."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compile_only, names = JITFunction.run, []

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        names.append(self.__name__)

    driver.set_active(H100())
    JITFunction.run = launch
    try:
        yield names
    finally:
        JITFunction.run = compile_only


@contextlib.contextmanager
def emulated(
    edit: Edit = lambda ptx: ptx, rounds: int = 0, by_turns: tuple[random.Random, int] | None = None, **options: int
) -> Iterator[None]:
    """Launches are compiled and run here, block after block.

    edit: changes what was compiled; rounds: see Program; by_turns: see `run_by_turns`; options: of launches. A launch
    raises Fault where a block does. In a process without Triton's interpreter.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    compile_only = JITFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs | options)
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        given = [bound[name] for name, kind in kernel.src.signature.items() if kind != "constexpr"]
        program = replace(Program.parse(edit(kernel.asm["ptx"]), kernel.metadata.shared), rounds=rounds)
        regions = list({region.start: region for region in map(region_of, given) if region}.values())
        numbers = [_number(each) for each in given]
        sizes = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
        if by_turns is not None:
            run_by_turns(program, numbers, regions, sizes, *by_turns)
            return
        for place in itertools.product(*map(range, sizes)):
            run(program, numbers, regions, place, sizes)

    driver.set_active(H100())
    JITFunction.run = launch
    try:
        yield
    finally:
        JITFunction.run = compile_only


def _number(argument: Any) -> int:
    """What a kernel takes: a tensor's address, the bits of a float, or the number itself."""
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def region_of(argument: object) -> Region | None:
    """A tensor's memory."""
    if not isinstance(argument, torch.Tensor):
        return None
    storage = argument.untyped_storage()
    data = np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
    return Region(storage.data_ptr(), data)


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(*ast.literal_eval(sys.argv[2]))


if __name__ == "__main__":
    main()
