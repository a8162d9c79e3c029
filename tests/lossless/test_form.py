"""A closed page holds every bit, takes 12.2 bits a value, and lies as the golden file says."""

import hashlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kvrail.engine.kv.closed import cpu
from kvrail.engine.kv.closed.forms import FORMS, orders, page_bytes, unsupported
from kvrail.engine.kv.closed.pages import LosslessPages, LossyPages
from kvrail.engine.kv.lossless.form import RAW, SOME, TOKENS, Tile, base_places, places, supports
from kvrail.errors import ConfigError
from kvrail.values.layout import KVLayout
from tests.lossless.cases import SHAPES, Bits, check_kernels, distributions, pages_of
from tests.reference.lossless_pages import close_tile, open_tile

DIMS = (64, 128, 192, 256)
NAMES = tuple(distributions((TOKENS, 64)))
GOLDEN = Path(__file__).parent / "golden.json"


def reopened(bits: Bits, keys: bool) -> Bits:
    tile, spare = close_tile(bits, keys, 1)
    units = np.full((2, bits.size), 0xFF, np.uint8)
    if spare is not None:
        units[1] = spare
    return open_tile(tile, bits.shape[1], keys, units)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("dim", DIMS)
def test_reference_is_exact(dim: int, keys: bool) -> None:
    for name, bits in distributions((TOKENS, dim)).items():
        assert np.array_equal(reopened(bits, keys), bits), name


@pytest.mark.parametrize("usual", [0x3F80, 0x0000, 0xBF80])
def test_every_pattern(usual: int) -> None:
    """Each of the 65,536, eight to a tile: in its window, or an escape, or making all others of its channel escape."""
    layout = KVLayout(1, 4, 64, 64, TOKENS, "bfloat16")
    keys = np.full((1, 2048, TOKENS, 4, 64), usual, np.uint16)
    at = 8 * np.arange(8)
    patterns = np.arange(65536, dtype=np.uint16).reshape(2048, 4, 8)
    keys[0, :, at, :, at] = patterns.transpose(2, 0, 1)
    plain, pages = pages_of(keys), torch.arange(2048)
    closed = LosslessPages(layout, 2048, 1 << 14, "cpu")
    assert closed.close(plain, plain.flip(1), pages, pages).sum() == 0
    assert closed.free[0] > 0  # some tiles are not raw
    opened = [torch.full_like(plain, 2.0) for _ in range(2)]
    closed.open(*opened, pages, pages)
    for ours, theirs in zip(opened, (plain, plain.flip(1)), strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize("dim", DIMS)
def test_places_are_a_permutation(dim: int) -> None:
    for keys in (True, False):
        assert np.array_equal(np.sort(places(dim, keys)), np.arange(TOKENS * dim))
        assert np.array_equal(np.sort(base_places(dim, keys)), np.arange(dim))


def test_sizes() -> None:
    assert Tile(128).bytes * 8 / (TOKENS * 128) == 12.1875
    assert Tile(64).bytes * 8 / (TOKENS * 64) == 12.25
    layout = KVLayout(36, 8, 128, 128, 64, "bfloat16")
    assert page_bytes(layout, 0) / layout.page_bytes == pytest.approx(12.1875 / 16)
    for dim in DIMS:
        assert Tile(dim).bytes % 64 == 0  # every part of every tile can be loaded 16 bytes at a time


def test_two_escapes_of_a_group_have_room_and_a_third_makes_the_tile_raw() -> None:
    bits = np.full((TOKENS, 128), 0x3F80, np.uint16)
    order = places(128, keys=True).reshape(2, 2, 4, 512)
    for number, place in enumerate((0, 511, 7)):
        bits.reshape(-1)[order[1, number % 2, 2, place]] = 0x8001
        tile, spare = close_tile(bits, True, 5)
        words = tile[Tile(128).escapes :].view(np.uint32)
        if number < 2:
            assert spare is None and words[0] == SOME and np.count_nonzero(words[1:]) == number + 1
            assert np.count_nonzero(words[12:14]) == number + 1
        else:
            assert spare is not None and words.tolist() == [RAW, 5] * 8


def golden() -> dict[str, str]:
    """The digest of each distribution's closed tile."""
    found = {}
    for dim in (64, 128):
        for name, bits in distributions((TOKENS, dim), seed=7).items():
            for kind in ("keys", "values"):
                tile, spare = close_tile(bits, kind == "keys", 3)
                data = tile.tobytes() + (b"" if spare is None else spare.tobytes())
                found[f"{name}, {kind}, {dim}"] = hashlib.sha256(data).hexdigest()
    return found


def test_golden_file() -> None:
    """`python -m tests.lossless.test_form` writes it."""
    assert golden() == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(("dims", "page_size"), SHAPES)
def test_kernels_do_what_the_reference_does(dims: tuple[int, int], page_size: int) -> None:
    check_kernels(dims, page_size, "cpu", cpu)


def test_spare_units_come_back() -> None:
    layout = KVLayout(2, 2, 64, 64, 64, "bfloat16")
    raw = pages_of(distributions((2, 3, 64, 2, 64))["random"])
    closed = LosslessPages(layout, 4, 20, "cpu")
    free = sorted(closed.free[1:-1].tolist())
    assert closed.close(raw, raw, torch.tensor([0, 1]), torch.tensor([2, 0])).sum() == 0
    assert closed.free[0] == 4
    assert closed.close(raw, raw, torch.tensor([2]), torch.tensor([2])).sum() == 0  # what page 2 held returns first
    assert closed.free[0] == 4
    assert closed.close(raw, raw, torch.tensor([2]), torch.tensor([1])).sum() == 4  # four tiles found a unit, four none
    assert closed.free[0] == 0
    closed.give_back(torch.tensor([0, 1, 2, 3]))
    assert closed.free[0] == 20 and sorted(closed.free[1:-1].tolist()) == free


def test_what_has_no_form_is_refused() -> None:
    for layout in (
        KVLayout(1, 1, 96, 96, 64, "bfloat16"),
        KVLayout(1, 1, 128, 128, 64, "float16"),
        KVLayout(1, 1, 128, 128, 16, "bfloat16"),
    ):
        assert unsupported(layout, 0)
        with pytest.raises(ConfigError, match="lossless"):
            LosslessPages(layout, 1, 1, "cpu")
    assert supports(128, "bfloat16") and orders(Tile(64), True)[0].dtype == np.int32


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=0) + "\n")


@pytest.mark.parametrize(("form", "kernels"), [("lossless", "lossless"), ("int4", "fixed"), ("rot3", "rotated")])
def test_a_pool_on_a_cpu_compiles_what_closes_its_pages_before_a_request_waits(
    form: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[ModuleType] = []
    monkeypatch.setattr(cpu, "compile_now", compiled.append)
    layout = KVLayout(1, 1, 64, 64, 64, "bfloat16")
    if form == "lossless":
        LosslessPages(layout, 1, 1, "cpu")
    else:
        LossyPages(layout, 1, FORMS[form], "cpu")
    assert f"kvrail.engine.kv.{kernels}.cpu_kernels" in {module.__name__ for module in compiled}
