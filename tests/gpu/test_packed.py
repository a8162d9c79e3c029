"""Packed weights on a GPU: unpacked and multiplied they give the bits of the plain ones, in layers and in models."""

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from torch.nn.functional import linear, pad  # noqa: E402

from kvrail.codec.fused.builds import unsupported  # noqa: E402

if unsupported(torch.device("cuda"), "packed"):
    pytest.skip(unsupported(torch.device("cuda"), "packed"), allow_module_level=True)

from kvrail.codec.packed import gpu, reference  # noqa: E402
from kvrail.codec.packed.torch_ops import pack  # noqa: E402
from kvrail.engine.batch import SequenceSlice  # noqa: E402
from kvrail.engine.invariance import choose_products  # noqa: E402
from kvrail.engine.loader import load_model  # noqa: E402
from kvrail.engine.runner import ModelRunner  # noqa: E402
from kvrail.services.weights import PackedLinear, hold  # noqa: E402
from tests.codec.test_packed import bits, normal, of_bits  # noqa: E402
from tests.engine import tiny_models  # noqa: E402

SHAPES = [(16, 64), (48, 64), (4096, 4096), (6144, 4096), (10240, 1024), (24576, 512), (896, 960), (1024, 6400)]
TOKENS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 300)


@pytest.fixture(autouse=True)
def sums_not_split():
    choose_products(invariant=True)
    yield
    choose_products(invariant=False)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_an_unpacked_weight_has_all_bits(rows, columns):
    weight = normal(rows, columns).cuda()
    assert torch.equal(bits(gpu.unpack(pack(weight))), bits(weight))


def test_every_pattern_of_sixteen_bits_comes_back():
    weight = of_bits(range(-(1 << 15), 1 << 15), 512)
    packed = pack(weight.cuda())
    assert torch.equal(bits(gpu.unpack(packed)).cpu(), bits(weight))
    assert torch.equal(bits(reference.unpack(packed)), bits(weight))


def test_both_devices_pack_alike():
    weight = normal(64, 320)
    on_cpu, on_gpu = pack(weight), pack(weight.cuda())
    for name in ("blocks", "index", "counts", "shifts", "scales"):
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_has_the_bits_of_cublaslt(rows, columns, biased):
    weight = normal(rows, columns).cuda()
    weight[:, :: columns // 8] *= 1000  # outliers, whose exponents are escapes
    packed = pack(weight)
    bias = normal(1, rows, 0.1, seed=2).cuda()[0] if biased else None
    for tokens in TOKENS:
        x = normal(tokens, columns, 1.0, seed=tokens).cuda()
        wanted = linear(pad(x, (0, 0, 0, max(0, 32 - tokens))), weight, bias)[:tokens]
        assert torch.equal(bits(gpu.multiply(x, packed, bias)), bits(wanted)), tokens


def test_products_with_infinities_zeros_and_nans():
    weight = normal(32, 128)
    weight[0], weight[1, 3], weight[2, 5] = 0.0, float("inf"), float("nan")
    weight = weight.cuda()
    x = normal(9, 128, 1.0).cuda()
    wanted = linear(pad(x, (0, 0, 0, 23)), weight)[:9]
    assert torch.allclose(gpu.multiply(x, pack(weight)), wanted, rtol=0, atol=0, equal_nan=True)


def test_a_product_in_a_graph_follows_its_input():
    weight, x = normal(4096, 1024).cuda(), normal(8, 1024, 1.0).cuda()
    packed = pack(weight)
    gpu.multiply(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu.multiply(x, packed)
    for seed in (5, 6):
        x.copy_(normal(8, 1024, 1.0, seed=seed).cuda())
        graph.replay()
        assert torch.equal(bits(out), bits(linear(pad(x, (0, 0, 0, 24)), weight)[:8]))


def load(name):
    if name != "demo":
        return tiny_models.load(name, device="cuda", kv_dtype="bfloat16")
    demo = "models/kvrail-demo"
    return load_model(demo, device="cuda", dtype="auto", kv_dtype="bfloat16", page_size=16, load_format="safetensors")


def logits_of(loaded, compile):
    torch._dynamo.reset()
    runner = ModelRunner(loaded, 64, max_running=16, max_batch_tokens=256, cuda_graphs=True, compile=compile)
    runner.warm_up()
    ids = [(7 * i) % loaded.vocab_size for i in range(90)]
    table = list(range(16))
    found = [runner.execute([SequenceSlice(ids[:77], 0, table, 1)]).clone()]
    found += [runner.execute([SequenceSlice([ids[at]], at, table, 1)]).clone() for at in range(77, 90)]
    return runner.finding, torch.cat(found)


@pytest.mark.parametrize(
    ("name", "compile"), [("llama", False), ("qwen3", False), ("demo", False), ("llama", True), ("qwen3", True)]
)
def test_a_packed_model_has_the_plain_ones_numerics(name, compile):
    plain_finding, plain = logits_of(load(name), compile)
    packed_model = hold(load(name), "packed", join=compile)
    assert any(isinstance(module, PackedLinear) for module in packed_model.model.modules())
    packed_finding, packed = logits_of(packed_model, compile)
    assert plain_finding.holds
    assert packed_finding == plain_finding
    assert torch.equal(packed, plain)
