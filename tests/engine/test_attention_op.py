"""The attention operator as torch.compile sees it: one node that writes pages where they lie."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from kvrail.engine.attention import cpu, reference
from kvrail.engine.attention.meta import Extents, StepMeta
from kvrail.engine.attention.options import ScoreOptions
from kvrail.engine.attention.step import PagedStep, bind_layer
from kvrail.engine.kv.cache import PagedCache
from kvrail.engine.kv.formats import LayerPages
from kvrail.values.layout import KVLayout

TOKENS = 5
EXTENTS = Extents(TOKENS, 1, 2, 0, 0, 2)


def store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerPages,
    meta: StepMeta,
    options: ScoreOptions,
) -> torch.Tensor:
    """Stands for attention: stores, and gives something that depends on what was stored before."""
    before = reference.read_pages(layer, torch.tensor([2]), key.dtype)[1].amax()
    reference.write_pages(layer, key, value, meta.slots.long())
    return (query[..., : value.shape[2]] * options.scale + before).contiguous()


def two_layers(x: torch.Tensor, step: PagedStep, layers: list[torch.nn.Module]) -> torch.Tensor:
    """Two layers of a model over one pool, with arithmetic between them."""
    for layer in layers:
        kv = x[:, :2] * 2
        x = x + step.attend(layer, x, kv, kv[..., :6], 0.5, 0, 0.0, None).amax() + 1
    return x


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2"])
def test_a_compiled_step_writes_the_pool_itself(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "paged_attention", store)
    data = torch.zeros(EXTENTS.words(), dtype=torch.int32)
    data[:TOKENS] = torch.tensor([40, 33, 34, 47, 32])  # page 2 of 16 tokens
    x = torch.randn(1, 4, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    layers = [torch.nn.Module(), torch.nn.Module()]
    for index, layer in enumerate(layers):
        bind_layer(layer, index)
    cache, other = (PagedCache(KVLayout(2, 2, 8, 6, 16, dtype), 3, "cpu") for _ in range(2))
    wanted = two_layers(x, PagedStep.over(other, data, EXTENTS.plan()), layers)
    torch._dynamo.reset()
    compiled = torch.compile(two_layers, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        found, code = run_and_get_code(compiled, x, PagedStep.over(cache, data, EXTENTS.plan()), layers)
    assert torch.equal(found, wanted)
    for ours, theirs in zip(cache.tensors.values(), other.tensors.values(), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert ours[:, 2].view(torch.uint8).any()
    given = re.findall(r"paged_attention\.default\(.*?\[(.*?)\]", code[0])
    pools = [name for each in given for name in each.split(", ")]
    assert len(pools) == 2 * len(cache.tensors)
    assert all(re.fullmatch(r"arg\d+_1", name) for name in pools), "a copy of the pool is given to the operator"
