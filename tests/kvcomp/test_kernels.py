"""Which codes kernels choose, in numba and in Triton's interpreter; tests/gpu runs the same case compiled."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from kvrail.engine.kv.closed import cpu, cuda
from tests.kvcomp.cases import check_both_sides


def test_a_cpus_kernels_choose_the_references_codes() -> None:
    check_both_sides(cpu, "cpu", 120)


def test_tritons_kernels_choose_the_references_codes() -> None:
    check_both_sides(cuda, "cpu", 20)
