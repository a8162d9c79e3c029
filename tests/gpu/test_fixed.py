"""Lossy pages on a GPU: closing, opening, and a step's attention, which gives the bits of opened pages."""

import copy

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from kvrail.engine.kv.closed import cuda  # noqa: E402
from kvrail.engine.kv.closed.forms import CODE_BITS, FORMS  # noqa: E402
from kvrail.engine.kv.closing_cache import PoolSize, closing_cache  # noqa: E402
from kvrail.engine.kv.slots import Closing  # noqa: E402
from kvrail.values.layout import KVLayout  # noqa: E402
from tests.fixed.cases import check_kernels  # noqa: E402
from tests.gpu.test_lossless import PLANS, SHAPES, attend, case_of  # noqa: E402
from tests.kvcomp.cases import check_both_sides  # noqa: E402
from tests.lossless.cases import close_case  # noqa: E402


@pytest.mark.parametrize("bits", CODE_BITS.values(), ids=CODE_BITS)
@pytest.mark.parametrize(("dims", "page_size"), [((64, 64), 64), ((128, 128), 128), ((64, 128), 64)])
def test_closing_and_opening(dims: tuple[int, int], page_size: int, bits: int) -> None:
    check_kernels(dims, page_size, bits, "cuda", cuda)


def test_kvcomps_kernels_choose_the_references_codes() -> None:
    check_both_sides(cuda, "cuda", 120)


@pytest.mark.parametrize("bits", CODE_BITS.values(), ids=CODE_BITS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_same_bits(plan: list, shape: dict, bits: int) -> None:
    case = case_of(plan, shape)
    for pages in (None, 1000):
        opened = copy.deepcopy(case)
        closed, tokens = close_case(copy.deepcopy(case), pages, code_bits=bits, opened=opened.pages)
        found, wanted = attend(closed, tokens), attend(opened)
        assert wanted.isfinite().all() and torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("form", FORMS)
def test_the_host_waits_for_no_closing(form: str) -> None:
    cache = closing_cache(KVLayout(2, 2, 64, 64, 64, "bfloat16"), PoolSize(8, 4, form), "cuda")
    cache.rehearse()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome = cache.close(Closing([1], [1], []))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    outcome.known(wait=True)
    assert outcome.failed == [0]
