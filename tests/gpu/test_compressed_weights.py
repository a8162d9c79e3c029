"""Weights held in fewer bytes on a GPU give the plain ones' bits, unpacked and in products, in models and workers."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from torch.nn.functional import linear, pad  # noqa: E402

from kvrail.codec.base import CodecError  # noqa: E402
from kvrail.codec.compact import gpu as compact_gpu  # noqa: E402
from kvrail.codec.compact.torch_ops import compress as compact  # noqa: E402
from kvrail.codec.fused.builds import unsupported  # noqa: E402
from kvrail.codec.papers.tbe import gpu as tbe_gpu  # noqa: E402
from kvrail.codec.papers.tbe.cpu import compress  # noqa: E402
from kvrail.codec.papers.tbe.format import TbeWeight  # noqa: E402
from kvrail.config.settings import DEMO_MODEL  # noqa: E402
from kvrail.engine.batch.batch import SequenceSlice  # noqa: E402
from kvrail.engine.model.loader import load_model  # noqa: E402
from kvrail.engine.step.invariance import choose_products  # noqa: E402
from kvrail.engine.step.runner import ModelRunner  # noqa: E402
from kvrail.worker.weights import METHODS, CompactLinear, TbeLinear, hold  # noqa: E402
from tests.cluster.cluster import cluster  # noqa: E402
from tests.cluster.test_equality import prompt_of  # noqa: E402
from tests.codec.test_compact import bits, normal, of_bits  # noqa: E402
from tests.engine import tiny_models  # noqa: E402
from tests.gpu.wide_model import wide_model  # noqa: E402
from tests.reference import compact as compact_reference  # noqa: E402
from tests.reference import tbe as tbe_reference  # noqa: E402

SHAPES = [(16, 64), (48, 64), (4096, 4096), (6144, 4096), (10240, 1024), (24576, 512), (896, 960), (1024, 6400)]
TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 40, 48, 49, 64, 65, 300)


@dataclass(frozen=True)
class Form:
    """A value of --weights. held: takes a weight to the GPU in this form. slowly: unpacks it by the reference."""

    name: str
    gpu: ModuleType
    linear: type
    held: Callable[[torch.Tensor], Any]
    slowly: Callable[[Any], torch.Tensor]


FORMS = (
    Form("compact", compact_gpu, CompactLinear, lambda weight: compact(weight.cuda()), compact_reference.unpack),
    Form(
        "tbe",
        tbe_gpu,
        TbeLinear,
        lambda weight: compress(weight).to("cuda"),
        lambda held: tbe_reference.decompress(held.to("cpu")),
    ),
)


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def form(request):
    if why := unsupported(torch.device("cuda"), request.param.name):
        pytest.skip(why)
    return request.param


@pytest.fixture(autouse=True)
def sums_not_split():
    choose_products(invariant=True)
    yield
    choose_products(invariant=False)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_an_unpacked_weight_has_all_bits(form, rows, columns):
    weight = normal(rows, columns)
    assert torch.equal(bits(form.gpu.unpack(form.held(weight))).cpu(), bits(weight))


def test_every_pattern_of_sixteen_bits_comes_back(form):
    weight = of_bits(range(-(1 << 15), 1 << 15), 512)
    held = form.held(weight)
    assert torch.equal(bits(form.gpu.unpack(held)).cpu(), bits(weight))
    assert torch.equal(bits(form.slowly(held)).cpu(), bits(weight))


def test_both_devices_pack_alike():
    weight = normal(64, 320)
    on_cpu, on_gpu = compact(weight), compact(weight.cuda())
    for name in ("blocks", "index", "counts", "shifts", "scales"):
        assert torch.equal(getattr(on_cpu, name), getattr(on_gpu, name).cpu())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_has_the_bits_of_cublaslt(form, rows, columns, biased):
    weight = normal(rows, columns)
    weight[:, :: columns // 8] *= 1000  # outliers, whose exponents have no code
    held, weight = form.held(weight), weight.cuda()
    bias = normal(1, rows, 0.1, seed=2).cuda()[0] if biased else None
    for tokens in TOKENS:
        x = normal(tokens, columns, 1.0, seed=tokens).cuda()
        wanted = linear(pad(x, (0, 0, 0, max(0, 32 - tokens))), weight, bias)[:tokens]
        assert torch.equal(bits(form.gpu.multiply(x, held, bias)), bits(wanted)), tokens


def test_products_with_infinities_zeros_and_nans(form):
    weight = normal(32, 128)
    weight[0], weight[1, 3], weight[2, 5] = 0.0, float("inf"), float("nan")
    x = normal(9, 128, 1.0).cuda()
    wanted = linear(pad(x, (0, 0, 0, 23)), weight.cuda())[:9]
    assert torch.allclose(form.gpu.multiply(x, form.held(weight)), wanted, rtol=0, atol=0, equal_nan=True)


def test_a_product_in_a_graph_follows_its_input(form):
    weight, x = normal(4096, 1024), normal(8, 1024, 1.0).cuda()
    held, weight = form.held(weight), weight.cuda()
    form.gpu.multiply(x, held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = form.gpu.multiply(x, held)
    for seed in (5, 6):
        x.copy_(normal(8, 1024, 1.0, seed=seed).cuda())
        graph.replay()
        assert torch.equal(bits(out), bits(linear(pad(x, (0, 0, 0, 24)), weight)[:8]))


def test_damage_is_refused_before_a_kernel_reads_it():
    held = compress(normal(128, 128)).to("cuda")
    offsets = held.offsets.clone()
    offsets[1, 0] = 1 << 30
    with pytest.raises(CodecError, match="offsets of BlockTile 1"):
        tbe_gpu.prepare(TbeWeight(128, 128, **(held.parts | {"offsets": offsets})))


def load(name, folder):
    if name == "wide":
        return wide_model(folder)
    path = DEMO_MODEL if name == "demo" else str(tiny_models.folder_of(name))
    return load_model(path, device="cuda", dtype="auto", kv_dtype="bfloat16", page_size=16, load_format="safetensors")


def logits_of(loaded, compile, graphs):
    torch._dynamo.reset()
    runner = ModelRunner(loaded, 200, max_running=16, max_batch_tokens=256, cuda_graphs=graphs, compile=compile)
    runner.warm_up()
    ids = [(7 * i) % loaded.vocab_size for i in range(90)]
    table = list(range(16))
    found = [runner.execute([SequenceSlice(ids[:77], 0, table, 1)]).clone()]
    found += [runner.execute([SequenceSlice([ids[at]], at, table, 1)]).clone() for at in range(77, 90)]
    return runner.finding, torch.cat(found)


@pytest.mark.parametrize(
    ("name", "compile", "graphs"),
    [
        ("llama", False, True),
        ("qwen3", False, False),
        ("demo", False, True),
        ("llama", True, True),
        ("wide", True, True),
        ("wide", True, False),
    ],
)
def test_a_model_held_so_has_the_plain_ones_numerics(form, name, compile, graphs, tmp_path):
    plain_finding, plain = logits_of(load(name, tmp_path), compile, graphs)
    model = hold(load(name, tmp_path), METHODS[form.name], join=compile)
    assert any(isinstance(module, form.linear) for module in model.model.modules())
    finding, found = logits_of(model, compile, graphs)
    assert plain_finding.holds
    assert finding == plain_finding
    assert torch.equal(found, plain)


async def test_workers_with_such_weights_give_the_plain_ones_tokens(form):
    prompts = [prompt_of(length) for length in (20, 150, 400)]

    async def answers(**forms):
        options = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "bfloat16", "compile": False}
        async with cluster(DEMO_MODEL, **options, **forms) as c:
            return [(await c.ask(prompt)).tokens for prompt in prompts], c.decode.model.loaded.fingerprint

    plain = await answers()
    assert await answers(weights=form.name) == plain
    assert await answers(decode={"weights": form.name}, prefill={"weights": "plain"}) == plain
