"""In which form a worker holds its weights: what the settings may ask for."""

import shutil
import weakref
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from kvrail.codec.fused import launch
from kvrail.codec.papers.tbe import gpu
from kvrail.config.settings import DecodeSettings, PrefillSettings
from kvrail.engine.model.fusion import merge_equal_products
from kvrail.engine.model.linear import JointLinear
from kvrail.errors import ConfigError
from kvrail.worker.weights import METHODS, TBE, forms_of, hold
from tests.codec.emulated import Emulated

COMPRESSED = [name for name in METHODS if name != "plain"]


@pytest.mark.parametrize("settings", [DecodeSettings, PrefillSettings])
def test_weights_stay_plain_unless_asked_for(settings):
    assert forms_of(settings(device="cpu")).hold is None


@pytest.mark.parametrize("form", COMPRESSED)
def test_such_weights_on_a_cpu_are_refused_by_name(form):
    with pytest.raises(
        ConfigError, match=f"weights is '{form}', but {form} weights need an NVIDIA GPU, not device cpu"
    ):
        forms_of(DecodeSettings(device="cpu", weights=form))


@pytest.mark.parametrize("form", COMPRESSED)
def test_such_weights_in_float32_are_refused_by_name(form):
    with pytest.raises(ConfigError, match=f"weights is '{form}', but dtype is 'float32'; only bfloat16 can be held so"):
        forms_of(DecodeSettings(device="cuda", dtype="float32", weights=form))


def test_the_settings_name_every_form():
    assert DecodeSettings.model_fields["weights"].annotation == Literal[*METHODS]


class Model(torch.nn.Module):
    """Layers of all kinds: two that share a weight, one with a bias, the embedding's, and some that must stay plain."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.nn.Parameter((torch.randn(shape, generator=generator) / 8).bfloat16(), requires_grad=False)

        joint = normal(128, 128)
        self.query, self.key = JointLinear(joint, None, 0, 80), JointLinear(joint, None, 80, 128)
        self.output, self.few, self.narrow = (torch.nn.Linear(1, 1) for _ in range(3))
        self.output.weight, self.output.bias = normal(192, 128), normal(192)
        self.few.weight, self.few.bias = normal(16, 128), None
        self.narrow.weight, self.narrow.bias = normal(64, 96), None
        self.embedding, self.head = torch.nn.Embedding(64, 128), torch.nn.Linear(1, 1)
        self.embedding.weight = normal(64, 128)
        self.head.weight, self.head.bias = self.embedding.weight, None

    def forward(self, x):
        return [self.query(x), self.key(x), self.output(x), self.few(x), self.narrow(x[..., :96]), self.head(x)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_layers_are_held_where_they_can_and_compute_what_they_did(tmp_path, monkeypatch, caplog):
    kernel = Emulated(tmp_path, gpu.FORM, None)

    def product(form, x, parts, rows, bias):
        assert form is gpu.FORM
        kernel.readable_everywhere()
        return torch.nn.functional.linear(x, kernel.unpack(parts, rows, x.shape[1], blocks=1), bias)

    monkeypatch.setattr(launch, "multiply", product)
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    model, x = Model(), torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = model(x)
    loaded = SimpleNamespace(model=model, layers=[], projections=[], config=None)
    with caplog.at_level("INFO", logger="kvrail.worker.weights"):
        assert hold(loaded, TBE, join=False) is loaded
    assert [type(module).__name__ for module in model.children()] == [
        *["TbeLinear"] * 3, *["Linear"] * 2, "Embedding", "Linear"
    ]  # fmt: skip
    for found, plain in zip(model(x), wanted, strict=True):
        assert torch.equal(found, plain)
    told = "\n".join(record.getMessage() for record in caplog.records)
    for reason in ("the embedding's, too", "they would take as much", "[64, 96] is no multiple of [16, 64]"):
        assert reason in told


@pytest.mark.parametrize("form", COMPRESSED)
def test_a_weight_is_let_go_before_another_form_takes_its_place_on_the_device(form, monkeypatch):
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    model, alive = Model(), []
    plain = [weakref.ref(model.query.weight), weakref.ref(model.output.weight)]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append([each() is not None for each in plain]))
    hold(SimpleNamespace(model=model, layers=[], projections=[], config=None), METHODS[form], join=False)
    assert alive[:2] == [[False, True], [False, False]]


@pytest.mark.parametrize("form", COMPRESSED)
def test_compiled_layers_share_a_product_and_know_its_shapes(form, monkeypatch):
    monkeypatch.setattr(launch, "multiply", lambda form, x, parts, rows, bias: x.new_zeros(len(x), rows))
    monkeypatch.setattr(launch, "prepare", lambda *_: None)
    model = Model()
    hold(SimpleNamespace(model=model, layers=[], projections=[], config=None), METHODS[form], join=False)
    found = []

    def backend(graph, inputs):
        found.append(merge_equal_products(graph.graph))
        sizes = {size for each in inputs if isinstance(each, torch.nn.Parameter) for size in each.shape}
        assert all(type(size) is int for size in sizes)
        return graph.forward

    compiled = torch.compile(model.forward, dynamic=True, backend=backend)
    for tokens in (3, 5, 30):
        compiled(torch.zeros(2, tokens, 128, dtype=torch.bfloat16))
    assert found == [1]  # query's and key's, once and for every number of tokens
