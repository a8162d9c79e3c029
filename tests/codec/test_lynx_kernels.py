"""Lynx's Triton kernels against the slow reference: in Triton's interpreter, or compiled where there is a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_blocks import bits_of, scattered, spec_of
from lynx_cases import kv_pages, matrices, reference_payloads

pytest.importorskip("triton")

from kvrail.codec.base import Block
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.papers.lynx import gpu, gpu_launch
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL, parse, parse_both, plans_of
from kvrail.codec.papers.lynx.plan import Coding
from tests.reference import lynx as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
CASES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim; element type; code
    ((1, 2, 16, 1, 32, 16), "bfloat16", LynxCode()),
    ((2, 1, 64, 2, 40, 24), "bfloat16", LynxCode()),  # several programs a page, columns beyond the last
    ((1, 2, 7, 3, 5, 9), "bfloat16", LynxCode()),  # odd sizes
    ((1, 1, 33, 1, 9, 130), "float16", LynxCode()),
    ((1, 2, 16, 1, 12, 8), "float32", LynxCode()),
    ((1, 2, 16, 2, 16, 24), "bfloat16", LynxCode(chunk=8)),
    ((1, 1, 43, 1, 17, 8), "bfloat16", LynxCode(chunk=8)),  # three chunks in either half, the last not full
    ((2, 1, 63, 1, 20, 12), "float16", LynxCode(chunk=16)),
    ((1, 1, 24, 1, 12, 20), "bfloat16", LynxCode(alpha=3.0)),
    ((1, 1, 40, 1, 9, 16), "bfloat16", LynxCode(alpha=0.25, chunk=8)),
    ((1, 1, 24, 1, 12, 20), "float32", LynxCode(alpha=60.0, chunk=8)),
]
NOISY = [(*case, 0.02) for case in CASES] + [(*case, 0.0) for case in CASES[::3]]
"""How much of the bits is random: some escapes, or none."""


def dense_of(payload, plans, stage):
    """Fixed sections of keys and of values, as tensors of their own."""
    first = HEADER_BYTES + plans[0].fixed_bytes[stage]
    parts = payload[HEADER_BYTES:first], payload[first : first + plans[1].fixed_bytes[stage]]
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]


def on_device(pages):
    """The same pages of a copy of the pool where the kernels run."""
    return replace(pages, pools=Block(*(tensor.to(DEVICE, copy=True) for tensor in pages.pools.tensors())))


@pytest.mark.parametrize(("shape", "dtype", "code", "noise"), NOISY + [(*case, 1.0) for case in CASES[::3]], ids=str)
def test_kernels_equal_the_reference(shape, dtype, code, noise):
    pages = kv_pages(spec_of(shape, dtype), 1, noise)
    plans, source = plans_of(pages.spec, code), on_device(pages)
    payloads = reference_payloads(pages, code, 2)
    expected = [dense_of(payload, plans, stage) for stage, payload in enumerate(payloads)]
    dense = [[torch.full_like(part, 0xA5, device=DEVICE) for part in parts] for parts in expected]
    gpu_launch.launch_encode(byte_pools(source), source.page_index(), plans, dense)
    for stage in (ANCHOR, RESIDUAL):
        for plan, ours, theirs in zip(plans, dense[stage], expected[stage], strict=True):
            for name, where in plan.sections[stage].items():
                found = ours[where.offset : where.end].cpu()
                assert torch.equal(found, theirs[where.offset : where.end]), (stage, name)
    assert bits_of(source.pools) == bits_of(pages.pools)
    wanted = scattered(pages.spec, 2)
    out = on_device(wanted)
    for stage in (RESIDUAL, ANCHOR):  # into pages that do not hold the one before
        inputs = [[part.to(DEVICE) for part in parts] for parts in expected[: stage + 1]]
        gpu_launch.launch_decode(byte_pools(out), out.page_index(), plans, inputs)
        tensors = zip(wanted.layer_pools(), plans, *expected, strict=True)
        for pool, plan, anchors, residuals in tensors:
            later = residuals.numpy() if stage == RESIDUAL else None
            reference.decode_tensor(anchors.numpy(), later, np.array(out.page_ids), plan, matrices(pool))
        assert bits_of(out.pools) == bits_of(wanted.pools)


@pytest.mark.parametrize(("shape", "dtype", "code", "noise"), NOISY, ids=str)
def test_payloads_equal_the_references_and_restore_every_bit(shape, dtype, code, noise):
    pages = kv_pages(spec_of(shape, dtype), 3, noise)
    plans, wanted = plans_of(pages.spec, code), scattered(pages.spec, 4)
    out = on_device(wanted)
    wanted.scatter(pages.gather())
    encoding = gpu.encode(on_device(pages), Coding(plans, 3))
    payloads = encoding.stages()
    assert [bytes(each) for each in payloads] == reference_payloads(pages, code, 3)
    assert encoding.stats().values == sum(plan.values for plan in plans)
    *sources, last = (np.frombuffer(payload, dtype=np.uint8) for payload in payloads)
    layouts = parse_both(*sources, pages.spec, code)
    gpu.decode(ANCHOR, sources[:1], layouts[:1], Coding(plans, 3), out)
    gpu.decode(RESIDUAL, sources, layouts, Coding(plans, 3), out)
    gpu.decode(EXACT, [last], [parse(last, pages.spec, code, EXACT)], Coding(plans, 3), out)
    assert bits_of(out.pools) == bits_of(wanted.pools)


def test_the_cases_have_streams_with_and_without_escapes_and_none():
    found = set()
    for shape, dtype, code in CASES:
        for noise in (0.0, 0.02):
            pages = kv_pages(spec_of(shape, dtype), 3, noise)
            payload = reference_payloads(pages, code, 3)[EXACT]
            layout = parse(np.frombuffer(payload, dtype=np.uint8), pages.spec, code, EXACT)
            found |= {(part.raw, part.escapes > 0) for part in layout.parts}
    assert found == {(False, False), (False, True), (True, False)}
