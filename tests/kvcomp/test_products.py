"""Products of benchmarks/kvcomp_kernels.py with closed pages, in Triton's interpreter: those of opened pages."""

import os

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the benchmark checks its products on this machine", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below

from benchmarks.kvcomp_kernels import Load


@pytest.fixture(scope="module")
def load() -> Load:
    """Two sequences of two pages, of which a program takes one."""
    return Load(2, 2, "cpu", 1)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("per", [pytest.param(1, marks=pytest.mark.heavy), 2])
def test_products_are_those_with_opened_pages(load: Load, kind: int, per: int) -> None:
    load.per = per
    load.check(0, kind)
    apart, lying = load.apart(0, kind), load.lying(0, kind)
    assert torch.equal(apart, lying) and apart.shape == load.fused(0, kind).shape


@pytest.mark.parametrize("kind", [0, 1])
def test_one_wrong_product_is_seen(load: Load, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = load.fused(0, kind)
    wrong[3, 2, 1] += wrong.abs().max() / 16
    monkeypatch.setattr(Load, "fused", lambda self, layer, kind: wrong)
    with pytest.raises(SystemExit, match=r"^1 products"):
        load.check(0, kind)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_wrong_scale_is_seen(load: Load, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = load.closed.pages.clone()
    pages[0, 3, 7, 0, kind * load.closed.tiles[0].bytes :].view(torch.int16)[0] += 1 << 7  # of one row, doubled
    monkeypatch.setattr(load.closed, "pages", pages)
    with pytest.raises(SystemExit, match="not those of a CPU"):
        load.check(0, kind)
