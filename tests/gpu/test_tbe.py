"""TCA-TBE weights on a GPU: decompressed and multiplied they give the plain ones' bits, also in models and workers."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from torch.nn.functional import linear, pad  # noqa: E402

from kvrail.codec.base import CodecError  # noqa: E402
from kvrail.codec.fused.builds import unsupported  # noqa: E402

if unsupported(torch.device("cuda"), "tbe"):
    pytest.skip(unsupported(torch.device("cuda"), "tbe"), allow_module_level=True)

from kvrail.codec.tbe import gpu  # noqa: E402
from kvrail.codec.tbe.cpu import compress  # noqa: E402
from kvrail.codec.tbe.format import TbeWeight  # noqa: E402
from kvrail.config import DEMO_MODEL  # noqa: E402
from kvrail.engine.invariance import choose_products  # noqa: E402
from kvrail.services.weights import TbeLinear, hold  # noqa: E402
from tests.cluster.cluster import cluster  # noqa: E402
from tests.cluster.test_equality import prompt_of  # noqa: E402
from tests.codec.test_packed import bits, normal, of_bits  # noqa: E402
from tests.gpu.test_packed import SHAPES, TOKENS, load, logits_of  # noqa: E402


@pytest.fixture(autouse=True)
def sums_not_split():
    choose_products(invariant=True)
    yield
    choose_products(invariant=False)


def held_of(weight):
    return compress(weight).to("cuda")


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_decompressed_weight_has_all_bits(rows, columns):
    weight = normal(rows, columns)
    assert torch.equal(bits(gpu.unpack(held_of(weight))).cpu(), bits(weight))


def test_every_pattern_of_sixteen_bits_comes_back():
    weight = of_bits(range(-(1 << 15), 1 << 15), 512)
    assert torch.equal(bits(gpu.unpack(held_of(weight))).cpu(), bits(weight))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_has_the_bits_of_cublaslt(rows, columns, biased):
    weight = normal(rows, columns).cuda()
    weight[:, :: columns // 8] *= 1000  # outliers, whose exponents have no code
    held = held_of(weight)
    bias = normal(1, rows, 0.1, seed=2).cuda()[0] if biased else None
    for tokens in TOKENS:
        x = normal(tokens, columns, 1.0, seed=tokens).cuda()
        wanted = linear(pad(x, (0, 0, 0, max(0, 32 - tokens))), weight, bias)[:tokens]
        assert torch.equal(bits(gpu.multiply(x, held, bias)), bits(wanted)), tokens


def test_products_with_infinities_zeros_and_nans():
    weight = normal(32, 128)
    weight[0], weight[1, 3], weight[2, 5] = 0.0, float("inf"), float("nan")
    weight = weight.cuda()
    x = normal(9, 128, 1.0).cuda()
    wanted = linear(pad(x, (0, 0, 0, 23)), weight)[:9]
    assert torch.allclose(gpu.multiply(x, held_of(weight)), wanted, rtol=0, atol=0, equal_nan=True)


def test_a_product_in_a_graph_follows_its_input():
    weight, x = normal(4096, 1024).cuda(), normal(8, 1024, 1.0).cuda()
    held = held_of(weight)
    gpu.multiply(x, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.multiply(x, held)
    for seed in (5, 6):
        x.copy_(normal(8, 1024, 1.0, seed=seed).cuda())
        graph.replay()
        assert torch.equal(bits(out), bits(linear(pad(x, (0, 0, 0, 24)), weight)[:8]))


def test_damage_is_refused_before_a_kernel_reads_it():
    held = held_of(normal(128, 128))
    offsets = held.offsets.clone()
    offsets[1, 0] = 1 << 30
    with pytest.raises(CodecError, match="offsets of BlockTile 1"):
        gpu.prepare(TbeWeight(128, 128, **(held.parts | {"offsets": offsets})))


@pytest.mark.parametrize(
    ("name", "compile"), [("llama", False), ("qwen3", False), ("demo", False), ("llama", True), ("qwen3", True)]
)
def test_a_model_held_so_has_the_plain_ones_numerics(name, compile):
    plain_finding, plain = logits_of(load(name), compile)
    model = hold(load(name), "tbe", join=compile)
    assert any(isinstance(module, TbeLinear) for module in model.model.modules())
    finding, found = logits_of(model, compile)
    assert plain_finding.holds
    assert finding == plain_finding
    assert torch.equal(found, plain)


async def test_workers_with_such_weights_give_the_plain_ones_tokens():
    prompts = [prompt_of(length) for length in (20, 150, 400)]

    async def answers(**forms):
        options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16", "compile": False}
        async with cluster(DEMO_MODEL, **options, **forms) as c:
            return [(await c.ask(prompt)).tokens for prompt in prompts], c.decode.loaded.fingerprint

    plain = await answers()
    assert await answers(weights="tbe") == plain
    assert await answers(decode={"weights": "tbe"}, prefill={"weights": "packed"}) == plain
