"""Kernels of weights in fewer bytes, tried on a CPU by their own source: every form unpacks and multiplies exactly.

Weights and tokens are small integers by a power of two, so that sums are exact in any order: what an emulated product
differs in is wrong. Bits of real sums are compared on GPUs (tests/gpu).
"""

import shutil

import pytest
import torch

from kvrail.codec.compact import gpu as compact_gpu
from kvrail.codec.compact.torch_ops import compress as compact
from kvrail.codec.fused import launch
from kvrail.codec.fused.builds import Build
from kvrail.codec.papers.tbe import gpu as tbe_gpu
from kvrail.codec.papers.tbe.cpu import compress
from tests.codec.emulated import Emulated
from tests.codec.test_compact import bits, normal, of_bits

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BUILDS = [
    ("compact", Build(1, 4, 2, 2)),
    ("compact", Build(8, 4, 2, 2)),
    ("tbe", Build(2, 9, 3, 2)),
    ("tbe", Build(8, 6, 3, 3)),
]


def compact_parts(weight):
    held = compact(weight)
    return [held.blocks, held.index, held.counts, held.scales]


def tbe_parts(weight):
    return list(compress(weight).parts.values())


FORMS = {"compact": (compact_gpu.FORM, compact_parts), "tbe": (tbe_gpu.FORM, tbe_parts)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module", params=BUILDS, ids=lambda given: f"{given[0]}-{8 * given[1].token_tiles}")
def product(request, folder):
    (form, parts), build = FORMS[request.param[0]], request.param[1]
    return Emulated(folder, form, build), parts


@pytest.fixture(scope="module")
def unpack(folder):
    return Emulated(folder, tbe_gpu.FORM, None)


def integers(rows, columns, most, seed):
    drawn = torch.randint(-most, most + 1, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.bfloat16)


def weights(rows, columns):
    weight = integers(rows, columns, 40, rows) * 2.0**-6
    weight[0, ::7], weight[1], weight[-1, ::3] = 0.0, 2.0**-9, 2.0**9  # what has no code, here and there and in a row
    return weight


@pytest.mark.parametrize(("rows", "columns", "missing"), [(64, 128, 5), (112, 320, 0), (16, 64, 7), (32, 8320, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_exact(product, rows, columns, missing, biased):
    kernel, parts = product
    tokens = 8 * kernel.build.token_tiles - missing
    weight, x = weights(rows, columns), integers(tokens, columns, 8, 1)
    bias = integers(1, rows, 8, 2)[0] if biased else None
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = kernel.product(parts(weight), x, bias, rows, blocks=2)
    assert torch.equal(found, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("form", list(FORMS))
def test_every_build_fits_into_shared_memory(form):
    for tiles in (1, 2, 4, 8):
        fitting = launch.builds(FORMS[form][0], tiles)
        assert len(fitting) >= 3
        for build in fitting:
            assert build.stages >= 2
            assert build.shared_bytes(FORMS[form][0].scratch) <= 232448
            assert build.producers % build.strips == 0


def test_every_pattern_of_sixteen_bits_is_decompressed(unpack):
    weight = of_bits(range(-(1 << 15), 1 << 15), 512)
    assert torch.equal(bits(unpack.unpack(tbe_parts(weight), 128, 512, blocks=3)), bits(weight))


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (112, 192), (64, 320)])
def test_normally_distributed_weights_are_decompressed(unpack, rows, columns):
    weight = normal(rows, columns)
    assert torch.equal(bits(unpack.unpack(tbe_parts(weight), rows, columns, blocks=2)), bits(weight))


def test_a_wrong_code_is_seen_by_these_tests(unpack):
    weight = normal(16, 64)
    parts = tbe_parts(weight)
    parts[1][0, 0, 0, 0] ^= 1 << 5
    assert not torch.equal(bits(unpack.unpack(parts, 16, 64, blocks=1)), bits(weight))
