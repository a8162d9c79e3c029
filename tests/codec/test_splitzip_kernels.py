"""SplitZip's Triton kernels in Triton's interpreter against the slow reference; tests/gpu runs them compiled."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_blocks import bits_of, copy_of, scattered, spec_of

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_splitzip.py covers these kernels on a GPU", allow_module_level=True)

from kvrail.codec.base import Block, CodecError
from kvrail.codec.splitzip.one_stage import gpu
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_encode
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles import gpu_launch
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode
from kvrail.codec.splitzip.tiles.payload import parse, scale_bytes_of, travels_raw
from kvrail.codec.splitzip.tiles.plan import plans_of
from tests.reference import tiles as reference

FIXED, FIXED_NARROW, CHANNEL = WindowCode(4, False, 256), WindowCode(3, False, 256), WindowCode(3, True, 256)
CASES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim; element type; code
    ((1, 1, 16, 1, 16, 32), "bfloat16", FIXED),  # blocks without padding, two values a word
    ((1, 1, 16, 1, 32, 16), "bfloat16", CHANNEL),
    ((2, 3, 16, 1, 16, 16), "bfloat16", WindowCode(4, False, 1024)),  # some tiles wide, some not
    ((1, 2, 7, 3, 5, 9), "bfloat16", FIXED),  # odd sizes, one value a word
    ((2, 1, 7, 3, 5, 12), "bfloat16", CHANNEL),
    ((1, 1, 63, 1, 33, 8), "bfloat16", WindowCode(3, True)),
    ((1, 1, 64, 1, 20, 68), "float16", WindowCode(4, False)),  # a tile narrower than its block, pages with padding
    ((1, 1, 16, 4, 16, 16), "float8_e5m2", FIXED),  # four values a word
    ((1, 1, 15, 9, 7, 9), "float8_e5m2", FIXED_NARROW),
    ((1, 1, 16, 2, 40, 48), "float8_e4m3fn", CHANNEL),
]
HEAVY = [
    ((2, 1, 16, 1, 16, 24), "bfloat16", WindowCode(4, True, 256)),
    ((1, 5, 14, 1, 256, 16), "bfloat16", FIXED),  # more tiles than a group has
    ((1, 2, 16, 4, 12, 16), "float16", CHANNEL),
    ((1, 1, 16, 2, 32, 40), "float8_e5m2", CHANNEL),
    ((1, 2, 16, 2, 16, 32), "float8_e4m3fn", FIXED_NARROW),
]
CASES += [pytest.param(*case, marks=pytest.mark.heavy) for case in HEAVY]
DRAWS = ((1, 0.5), (2, 1.0))
"""Seeds of pages, and how unequal their channels are."""


def pages_of(shape, dtype, code, seed, spread):
    """Scattered pages: channels of unequal scale, some values tiny and, where no top suffers, of any bits."""
    pages = scattered(spec_of(shape, dtype), seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pages.pools.keys, pages.pools.values):
        scales = torch.exp(spread * torch.randn(tensor.shape[-2:], generator=generator))
        drawn = torch.randn(tensor.shape, generator=generator) * scales
        lot = torch.rand(tensor.shape, generator=generator)
        drawn[lot < 0.02] *= 2.0**-16
        off = lot > (1.0 if code.per_channel else 0.997)
        as_bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
        tensor.view(as_bits)[~off] = drawn.to(tensor.dtype).view(as_bits)[~off]
    return pages


def tops_of(pages, code):
    if code.per_channel:
        return None, None
    layers, middle = len(pages.layers), FORMATS[pages.spec.dtype].exponents // 2
    return middle + 1 + np.arange(layers), middle - np.arange(layers)


def expected(pages, plans, tops):
    """Dense part, records and extensions of keys and of values, by the reference."""
    parts = []
    for pool, plan, top in zip(pages.layer_pools(), plans, tops, strict=False):
        bits = pool.flatten(3).view(torch.uint8 if pool.element_size() == 1 else torch.uint16).numpy()
        dense = np.full(plan.fixed_bytes, 0xA5, dtype=np.uint8)
        records, extensions = reference.encode_tensor(bits, np.array(pages.page_ids), plan, top, dense)
        parts.append((dense, records, extensions))
    return parts


def poisoned(plans, spec):
    buffers = gpu_launch.EncodeBuffers.allocate(plans, scale_bytes_of(spec), torch.device("cpu"))
    for tensor in (buffers.body, buffers.totals, *vars_of(buffers.slots[0]), *vars_of(buffers.slots[1])):
        tensor.view(torch.uint8).fill_(0xA5)
    return buffers


def vars_of(slots):
    return [getattr(slots, name) for name in slots.__dataclass_fields__]


def check_buffers(buffers, pages, plans, tops):
    """Whether `buffers` hold what the reference gives; escapes as far as there is room."""
    for number, (dense, records, extensions) in enumerate(expected(pages, plans, tops)):
        assert gpu_launch.tiles_of(plans[number]) > 0
        plan, slots, ours = plans[number], buffers.slots[number], buffers.dense(plans)[number].numpy()
        for name, section in plan.sections.items():
            assert ours[section.offset : section.end].tobytes() == dense[section.offset : section.end].tobytes(), name
        assert buffers.totals[number].tolist() == [records.size, extensions.size]
        if not travels_raw(plan, records.size, extensions.size):
            assert slots.packed_records[: records.size].numpy().tobytes() == records.tobytes()
            assert slots.packed_extensions[: extensions.size].numpy().tobytes() == extensions.tobytes()


def encodes_as_the_reference(shape, dtype, code, draws):
    """Encode pages of each of `draws` into the same buffers, which held something else, and compare."""
    buffers = None
    for seed, spread in draws:
        pages = pages_of(shape, dtype, code, seed, spread)
        plans, tops = plans_of(pages.spec, code), tops_of(pages, code)
        buffers = buffers or poisoned(plans, pages.spec)
        launch_encode(pages, plans, gpu_launch.make_table(pages, tops), buffers)
        check_buffers(buffers, pages, plans, tops)


@pytest.mark.parametrize(("shape", "dtype", "code"), CASES[3:], ids=str)
def test_encode_equals_the_reference(shape, dtype, code):
    encodes_as_the_reference(shape, dtype, code, DRAWS[1:])


@pytest.mark.parametrize(("shape", "dtype", "code"), CASES[:3], ids=str)
def test_encode_into_buffers_used_before(shape, dtype, code):
    encodes_as_the_reference(shape, dtype, code, DRAWS)


@pytest.mark.parametrize(("shape", "dtype", "code"), CASES, ids=str)
def test_payload_decodes_into_the_pages_named_and_no_others(shape, dtype, code):
    pages, out = pages_of(shape, dtype, code, 1, 0.5), scattered(spec_of(shape, dtype), 2)
    before, wanted = bits_of(pages.pools), copy_of(out)
    wanted.scatter(pages.gather())
    tops = tops_of(pages, code)
    encoding = gpu.encode(pages, Coding(plans_of(pages.spec, code), tops))
    payload = np.frombuffer(encoding.stages()[0], dtype=np.uint8)
    layout = parse(payload, pages.spec, plans_of(pages.spec, code))
    assert not (layout.parts[0].raw and layout.parts[1].raw)
    assert encoding.stats().escapes == layout.parts[0].records + layout.parts[1].records
    gpu.decode(0, [payload], [layout], Coding(plans_of(pages.spec, code), tops), out)
    assert bits_of(out.pools) == bits_of(wanted.pools)
    assert bits_of(pages.pools) == before


def test_the_cases_have_escapes_with_and_without_extensions():
    found = {"narrow": 0, "wide": 0}
    for shape, dtype, code in CASES[:4]:
        for seed, spread in DRAWS:
            pages = pages_of(shape, dtype, code, seed, spread)
            for _, records, extensions in expected(pages, plans_of(pages.spec, code), tops_of(pages, code)):
                found["wide"] += extensions.size
                found["narrow"] += records.size - extensions.size
    assert found["wide"] > 0
    assert found["narrow"] > 0


@pytest.mark.parametrize("code", [FIXED, CHANNEL], ids=["fixed", "channel"])
def test_a_tensor_that_would_grow_travels_raw_by_itself(code):
    shape = (1, 2, 16, 1, 16, 16)
    pages = pages_of(shape, "bfloat16", code, 1, 0.1)
    noise = scattered(spec_of(shape, "bfloat16"), 1).pools
    pages = replace(pages, pools=Block(noise.keys, pages.pools.values))
    tops = tops_of(pages, code)
    encoding = gpu.encode(pages, Coding(plans_of(pages.spec, code), tops))
    payload = np.frombuffer(encoding.stages()[0], dtype=np.uint8)
    layout = parse(payload, pages.spec, plans_of(pages.spec, code))
    assert (layout.parts[0].raw, layout.parts[1].raw, encoding.stats().raw_tensors) == (True, False, 1)
    out = scattered(pages.spec, 3)
    wanted = copy_of(out)
    wanted.scatter(pages.gather())
    gpu.decode(0, [payload], [layout], Coding(plans_of(pages.spec, code), tops), out)
    assert bits_of(out.pools) == bits_of(wanted.pools)


def test_pages_whose_rows_are_not_contiguous_are_refused():
    pages = scattered(spec_of((1, 1, 4, 2, 8, 8), "bfloat16"), 1)
    pools = Block(pages.pools.keys.transpose(2, 3), pages.pools.values.transpose(2, 3))
    pages = replace(pages, pools=pools)
    with pytest.raises(CodecError, match="contiguous"):
        gpu.encode(pages, Coding(plans_of(pages.spec, FIXED), tops_of(pages, FIXED)))


@pytest.mark.parametrize(("shape", "dtype", "code"), CASES[:2], ids=str)
def test_more_escapes_than_there_is_room_for_take_larger_memory(shape, dtype, code, monkeypatch):
    pages = pages_of(shape, dtype, code, 1, 0.5)
    plans, tops = plans_of(pages.spec, code), tops_of(pages, code)
    usual = gpu.encode(pages, Coding(plans, tops))
    monkeypatch.setattr(gpu, "ESCAPE_SHARE", 1 << 40)
    encoding = gpu.encode(pages, Coding(plans, tops))
    room = encoding._host.numel()
    payload = bytes(encoding.stages()[0])
    assert payload == bytes(usual.stages()[0]) and len(payload) > room
