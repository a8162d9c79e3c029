"""Closing and opening of pages as compiled for an H100, on a CPU: the reference's bytes, and no race.

tests/lossless and tests/fixed run the same cases in Triton's interpreter, which shows neither what the compiler makes
of a kernel nor a missing barrier.
"""

from pathlib import Path

import pytest

from kvrail.engine.kv.closed.forms import FORMS
from tests.ptx.compiled import emulated, in_a_child


def close_and_open(form: str, dims: tuple[int, int], page_size: int) -> None:
    """In a process that compiles."""
    from kvrail.engine.kv.closed import cuda
    from tests.fixed import cases as lossy
    from tests.lossless import cases

    # With fewer than four warps matrices are multiplied by each warp alone, as the emulator knows it.
    with emulated(**{"num_warps": 2} if form == "rot3" else {}):
        if form == "lossless":
            cases.check_kernels(dims, page_size, "cpu", cuda, few=True)
        else:
            lossy.check_kernels(dims, page_size, FORMS[form], "cpu", cuda, few=True)


def test_lossless_pages(cache: Path) -> None:
    in_a_child(close_and_open, "lossless", (64, 64), 64, cache=cache)


@pytest.mark.heavy
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dims", "page_size"), [((64, 128), 64), ((128, 64), 128)])
def test_pages(form: str, dims: tuple[int, int], page_size: int, cache: Path) -> None:
    in_a_child(close_and_open, form, dims, page_size, cache=cache)
