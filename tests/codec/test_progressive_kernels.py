"""The progressive codec's Triton kernels in the interpreter: payloads and pages equal the reference's."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from kv_blocks import bits_of, copy_of, scattered, spec_of

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/codec/test_progressive_gpu.py covers these kernels on a GPU", allow_module_level=True)

from progressive_cases import kv_pages, middles, plans_of, reference_payloads
from test_splitzip_kernels import pages_of as kernel_pages

from kvrail.codec.base import Block, CodecError
from kvrail.codec.splitzip.progressive import gpu, gpu_launch
from kvrail.codec.splitzip.progressive.format import Cut
from kvrail.codec.splitzip.progressive.payload import parse_both, parse_rest
from kvrail.codec.splitzip.tiles import gpu as tiles_gpu
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import HEADER_BYTES, scale_bytes_of

CASES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim; element type; cut; chunk
    ((1, 1, 16, 1, 32, 16), "bfloat16", Cut(), 256),  # blocks without padding, two values a word
    ((2, 1, 15, 3, 11, 12), "bfloat16", Cut(1, 3), 256),  # odd sizes, one value a word
    ((1, 1, 63, 1, 33, 8), "bfloat16", Cut(), 4096),
    ((1, 1, 64, 1, 20, 68), "float16", Cut(3, 2), 4096),  # a tile narrower than its block, pages with padding
    ((1, 1, 16, 2, 32, 40), "float8_e5m2", Cut(), 256),  # four values a word, no second stage
    ((1, 1, 16, 2, 40, 48), "float8_e4m3fn", Cut(), 256),
]
HEAVY = [
    ((2, 3, 16, 1, 16, 16), "bfloat16", Cut(3, 1), 1024),
    ((1, 2, 16, 4, 12, 16), "float16", Cut(), 256),  # planes of eight and of one
    ((2, 2, 16, 3, 11, 9), "float16", Cut(1, 3), 256),
]
MANY_TILES = ((1, 1, 8, 1, 2112, 32), "bfloat16", Cut(2, 2), 256)
"""More than a group has: to be decoded."""


def with_heavy(*heavy):
    """All cases, the heavy ones marked."""
    return [*CASES, *(pytest.param(*case, marks=pytest.mark.heavy) for case in heavy)]


DRAWS = ((1, 0.5), (2, 1.0))
"""Seeds of pages, and how unequal their channels are."""


def pages_of(shape, dtype, chunk, seed, spread):
    """Scattered pages: channels of unequal scale, some values tiny, a few zero."""
    pages = kernel_pages(shape, dtype, WindowCode(3, True, chunk), seed, spread)
    for tensor in (pages.pools.keys, pages.pools.values):
        tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).view(-1)[:: 210 + seed] = 0
    return pages


def poisoned(plans, spec):
    """Buffers of an encoding that hold what another one might have left."""
    buffers = gpu_launch.StageBuffers.allocate(plans, scale_bytes_of(spec), torch.device("cpu"))
    anchor = buffers.anchor
    slots = [getattr(each, name) for each in anchor.slots for name in each.__dataclass_fields__]
    for tensor in (buffers.rest, anchor.body, anchor.totals, *slots):
        tensor.view(torch.uint8).fill_(0xA5)
    return buffers


def payloads_of(pages, plans, buffers, monkeypatch):
    """Both payloads, made in `buffers`."""
    monkeypatch.setattr(gpu.StageBuffers, "allocate", lambda *_: buffers)
    encoding = gpu.encode(pages, plans)
    return [bytes(stage) for stage in encoding.stages()], encoding.stats()


def encodes_as_the_reference(shape, dtype, cut, chunk, monkeypatch, draws):
    """Encode pages of each of `draws` into the same buffers, which held something else, and compare."""
    buffers = None
    for seed, spread in draws:
        pages = pages_of(shape, dtype, chunk, seed, spread)
        plans = plans_of(pages.spec, cut, chunk)
        buffers = buffers or poisoned(plans, pages.spec)
        payloads, _ = payloads_of(pages, plans, buffers, monkeypatch)
        assert payloads == list(reference_payloads(pages, plans))


@pytest.mark.parametrize(("shape", "dtype", "cut", "chunk"), with_heavy(*HEAVY), ids=str)
def test_both_stages_equal_the_reference(shape, dtype, cut, chunk, monkeypatch):
    encodes_as_the_reference(shape, dtype, cut, chunk, monkeypatch, DRAWS[1:])


@pytest.mark.parametrize(("shape", "dtype", "cut", "chunk"), CASES[:2], ids=str)
def test_both_stages_into_buffers_used_before(shape, dtype, cut, chunk, monkeypatch):
    encodes_as_the_reference(shape, dtype, cut, chunk, monkeypatch, DRAWS)


@pytest.mark.parametrize(("shape", "dtype", "cut", "chunk"), with_heavy(*HEAVY, MANY_TILES), ids=str)
def test_stages_decode_into_the_pages_named_and_no_others(shape, dtype, cut, chunk):
    pages, out = pages_of(shape, dtype, chunk, 1, 0.5), scattered(spec_of(shape, dtype), 2)
    plans, wanted = plans_of(pages.spec, cut, chunk), copy_of(out)
    first, second = (np.frombuffer(stage, dtype=np.uint8) for stage in reference_payloads(pages, plans))
    anchor, rest = parse_both(first, second, pages.spec, plans)
    assert not rest.keys.raw and not rest.values.raw and rest.keys.records
    gpu.decode_anchor(first, anchor, out)
    wanted.scatter(middles(pages.gather(), plans))
    assert bits_of(out.pools) == bits_of(wanted.pools)
    for pool in out.layer_pools()[:2]:
        pool[:, out.page_ids] = torch.nan  # what lies there is not asked for
    gpu.decode_exact((first, second), (anchor, rest), out)
    wanted.scatter(pages.gather())
    assert bits_of(out.pools) == bits_of(wanted.pools)


def test_the_cases_have_escapes_with_and_without_extensions():
    layouts = []
    for shape, dtype, cut, chunk in CASES:
        pages = pages_of(shape, dtype, chunk, 1, 0.5)
        plans = plans_of(pages.spec, cut, chunk)
        layouts.append(parse_rest(np.frombuffer(reference_payloads(pages, plans)[1], np.uint8), plans))
    parts = [part for layout in layouts for part in layout.parts]
    assert any(part.extensions for part in parts) and any(part.records > part.extensions for part in parts)


@pytest.mark.parametrize("raw", [("keys",), ("values",), ("keys", "values")], ids=str)
def test_a_tensor_that_would_grow_travels_raw_in_the_first_stage(raw):
    shape = (1, 2, 16, 1, 16, 16)
    pages = kv_pages(spec_of(shape, "bfloat16"), 1, outliers=0)
    noise = scattered(spec_of(shape, "bfloat16"), 1).pools
    pages = dataclasses.replace(
        pages, pools=dataclasses.replace(pages.pools, **{name: getattr(noise, name) for name in raw})
    )
    plans = plans_of(pages.spec, chunk=256)
    encoding = gpu.encode(pages, plans)
    first, second = (np.frombuffer(stage, dtype=np.uint8) for stage in encoding.stages())
    assert (first.tobytes(), second.tobytes()) == reference_payloads(pages, plans)
    assert encoding.stats().raw_tensors == len(raw)
    assert second.size == HEADER_BYTES if len(raw) == 2 else second.size > HEADER_BYTES
    out = scattered(pages.spec, 3)
    wanted = copy_of(out)
    wanted.scatter(pages.gather())
    anchor, rest = parse_both(first, second, pages.spec, plans)
    gpu.decode_anchor(first, anchor, out)
    gpu.decode_exact((first, second), (anchor, rest), out)
    assert bits_of(out.pools) == bits_of(wanted.pools)


def test_pages_whose_rows_are_not_contiguous_are_refused():
    pages = scattered(spec_of((1, 1, 4, 2, 8, 8), "bfloat16"), 1)
    plans = plans_of(pages.spec)
    stages = [np.frombuffer(stage, dtype=np.uint8) for stage in reference_payloads(pages, plans)]
    pools = Block(pages.pools.keys.transpose(2, 3), pages.pools.values.transpose(2, 3))
    turned = dataclasses.replace(pages, pools=pools)
    with pytest.raises(CodecError, match="contiguous"):
        gpu.encode(turned, plans)
    layouts = parse_both(*stages, pages.spec, plans)
    with pytest.raises(CodecError, match="contiguous"):
        gpu.decode_anchor(stages[0], layouts[0], turned)
    with pytest.raises(CodecError, match="contiguous"):
        gpu.decode_exact(stages, layouts, turned)


def test_memory_goes_back_as_soon_as_nothing_refers_to_it():
    """A cycle would keep pinned memory until Python looks for cycles, and each encoding would take fresh memory."""
    pages = kv_pages(spec_of((1, 4, 16, 1, 16, 16), "bfloat16"), 1, outliers=0)
    gc.disable()
    try:
        encoding = gpu.encode(pages, plans_of(pages.spec, chunk=256))
        seen = weakref.ref(encoding), weakref.ref(encoding._anchor), weakref.ref(encoding._host)
        payloads = encoding.stages()
        del encoding
        assert seen[0]() is None and seen[1]() is None
        del payloads
        assert seen[2]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("shape", "dtype", "cut", "chunk"), CASES[:2], ids=str)
def test_more_escapes_than_there_is_room_for_take_larger_memory(shape, dtype, cut, chunk, monkeypatch):
    monkeypatch.setattr(tiles_gpu, "ESCAPE_SHARE", 1 << 40)
    pages = pages_of(shape, dtype, chunk, 1, 0.5)
    plans = plans_of(pages.spec, cut, chunk)
    encoding = gpu.encode(pages, plans)
    room = encoding._host.numel()
    payloads = [bytes(stage) for stage in encoding.stages()]
    assert payloads == list(reference_payloads(pages, plans)) and len(payloads[1]) > room
