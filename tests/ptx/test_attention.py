"""Every kernel over pages that are not plain compiles for an H100: the interpreter runs what the compiler refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrail.engine.kv.closed.forms import FORMS
from kvrail.values.layout import KVLayout
from tests.ptx.compiled import compiling, in_a_child

HEADS, KV_HEADS, TOKENS = 8, 2, 64


def compile_all(form: str, dims: tuple[int, int]) -> None:
    from kvrail.engine.kv.closed import cuda
    from kvrail.engine.kv.closed.pages import ClosedPages, LosslessPages, LossyPages
    from kvrail.engine.kv.formats import LayerPages

    layout, one = KVLayout(1, KV_HEADS, *dims, TOKENS, "bfloat16"), torch.zeros(1, dtype=torch.int64)
    closed: ClosedPages = LosslessPages(layout, 1, 1, "cpu")
    if FORMS[form]:
        closed = LossyPages(layout, 1, FORMS[form], "cpu")
    keys, values = (torch.zeros(1, 1, TOKENS, KV_HEADS, dim).bfloat16() for dim in dims)
    with compiling() as compiled:
        cuda.close(closed, keys, values, one, one)
        cuda.open(closed, keys, values, one, one)
        attend(LayerPages(keys[0], values[0], closed=closed.layer(0)), dims)
    assert {"close_pages", "open_pages", "_decode_kernel", "_prefill_kernel"} <= set(compiled)


def attend(layer: Any, dims: tuple[int, int]) -> None:
    from kvrail.engine.attention.options import ScoreOptions
    from kvrail.engine.attention.triton.decode_kernel import decode_attention
    from kvrail.engine.attention.triton.prefill_kernel import prefill_attention

    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    closed, options = lengths if layer.closed else None, ScoreOptions(1.0)
    counters, blocks = torch.zeros(KV_HEADS, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    key, value = (torch.zeros(1, KV_HEADS, dim).bfloat16() for dim in dims)
    for tokens in (1, 8, 512):
        query, out = (torch.zeros(tokens, HEADS, dim).bfloat16() for dim in dims)
        if tokens == 1:
            decode_attention(query, key, value, layer, table, lengths, blocks, counters, out, options, None, closed)
        else:
            prefill_attention(query, layer, table, blocks, out, options, 132, None, closed)


def compile_scaled(types: list[str]) -> None:
    from kvrail.engine.kv.formats import LayerPages

    for name in types:
        pool = torch.zeros(1, TOKENS, KV_HEADS, 128).to(getattr(torch, name))
        scales = torch.ones(1, TOKENS, KV_HEADS)
        with compiling() as compiled:
            attend(LayerPages(pool, pool, scales, scales), (128, 128))
        assert {"_decode_kernel", "_prefill_kernel"} <= set(compiled)


def compile_forms(forms: list[str], dims: tuple[int, int]) -> None:
    for form in forms:
        compile_all(form, dims)


def test_heads_of_128(cache: Path) -> None:
    in_a_child(compile_forms, ["lossless", "int4", "kvcomp", "rot3"], (128, 128), cache=cache)


def test_scaled_pages(cache: Path) -> None:
    in_a_child(compile_scaled, ["float8_e4m3fn", "float8_e5m2"], cache=cache)


@pytest.mark.heavy
@pytest.mark.parametrize("dims", [(64, 64), (64, 128)])
def test_other_heads(dims: tuple[int, int], cache: Path) -> None:
    in_a_child(compile_forms, list(FORMS), dims, cache=cache)
