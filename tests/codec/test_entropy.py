"""splitzip-ans: what conformance cannot see: that codes are coded, and that wrong coded bytes are refused."""

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of

from kvrail.codec.base import Block, CodecError, PagedBlock
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.entropy import cpu
from kvrail.codec.splitzip.entropy.codec import AnsCodec
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.tiles.format import FORMATS, WindowCode

GOLDEN = Path(__file__).parent / "golden"
DEMO = Path(__file__).parents[2] / "models" / "kvrail-demo"
LENGTHS = struct.Struct("<5Q")
BODY = HEADER_BYTES + LENGTHS.size
DTYPES = ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
SHAPES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim
    (1, 2, 64, 4, 64, 64),
    (2, 3, 16, 2, 64, 48),
    (3, 1, 7, 3, 5, 9),
    (1, 5, 63, 1, 33, 31),
    (2, 2, 500, 1, 3, 2),
    (1, 1, 1, 1, 1, 1),
    (1, 16, 64, 4, 64, 64),  # enough for two threads
]


@pytest.fixture(scope="module")
def codec():
    return AnsCodec()


def kv_block(shape, dtype="bfloat16", seed=0):
    """Normal values, each channel of a layer with a scale of its own, log-normal."""
    spec, rng = spec_of(shape, dtype), np.random.default_rng(seed)
    block = random_block(spec, seed)
    for tensor in (block.keys, block.values):
        scales = np.exp(rng.standard_normal((tensor.shape[0], 1, 1, *tensor.shape[3:])))
        tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape) * scales).to(tensor.dtype))
    return block


def in_pool(block, seed=0, first_layer=1):
    """The block in scattered pages of a pool of random bits."""
    pages = scattered(block.spec, seed)
    if first_layer == 0:
        pages = PagedBlock(pages.pools, range(block.spec.num_layers), pages.page_ids)
    pages.scatter(block)
    return pages


def encode(codec, pages):
    (payload,) = codec.encode(pages).stages()
    return payload


def lengths_of(payload):
    return LENGTHS.unpack_from(payload, HEADER_BYTES)


def pieces_of(payload):
    ends = np.cumsum([BODY, *lengths_of(payload)]).tolist()
    return [bytes(payload[start:end]) for start, end in pairwise(ends)]


def joined(payload, pieces):
    """The payload with other pieces, lengths fitting."""
    return bytes(payload[:HEADER_BYTES]) + LENGTHS.pack(*map(len, pieces)) + b"".join(pieces)


def bits_of_exponents(block):
    """Order-0 entropy of the exponents, bits a value, mean of keys and values; bfloat16 alone."""
    entropies = []
    for tensor in (block.keys, block.values):
        counts = np.bincount((tensor.contiguous().view(torch.int16).numpy().ravel() >> 7) & 255)
        share = counts[counts > 0] / counts.sum()
        entropies.append(-(share * np.log2(share)).sum())
    return np.mean(entropies)


@pytest.mark.parametrize("first_layer", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_restores_every_bit_and_no_other_page(codec, dtype, shape, first_layer):
    block = kv_block(shape, dtype)
    pages, out = in_pool(block, 1, first_layer), in_pool(random_block(block.spec, 2), 3, first_layer)
    expected = copy_of(out)
    expected.scatter(block)
    codec.decode(0, [encode(codec, pages)], out)
    assert bits_of(out.pools) == bits_of(expected.pools)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_payload_in_one_stage_is_restored_byte_for_byte(codec, dtype, monkeypatch):
    restored, decode = [], cpu.one_stage.decode

    def kept(stage, payloads, *others):
        restored.append(bytes(payloads[0]))
        decode(stage, payloads, *others)

    monkeypatch.setattr(cpu.one_stage, "decode", kept)
    pages = in_pool(kv_block(SHAPES[0], dtype))
    codec.decode(0, [encode(codec, pages)], copy_of(pages))
    inner = WindowCodec("inner", dict.fromkeys(FORMATS, WindowCode(4, per_channel=True, chunk=4096)), None)
    assert restored == [bytes(encode(inner, pages))]


def test_ratio_is_above_the_entropy_of_exponents_on_scaled_channels(codec):
    block = kv_block((1, 8, 64, 4, 64, 64))
    ratio = block.spec.raw_bytes / encode(codec, in_pool(block)).nbytes
    assert ratio > 1.02 * 16 / (8 + bits_of_exponents(block))


@pytest.fixture(scope="module")
def demo_kv():
    """KV of the demo model, bfloat16: keys and values [layers, pages, 64, heads, dim] of 1,024 tokens of text."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    ids = tokenizer((DEMO / "heldout.txt").read_text(), return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers

    def paged(tensors):
        heads, _, dim = tensors[0][0].shape
        return torch.stack([t[0].transpose(0, 1) for t in tensors]).reshape(len(tensors), -1, 64, heads, dim)

    return Block(paged([layer.keys for layer in layers]), paged([layer.values for layer in layers]))


def test_ratio_on_the_demo_model(codec, demo_kv):
    raw = coded = 0
    bits = []
    for layer in range(demo_kv.keys.shape[0]):
        pages = PagedBlock(demo_kv, range(layer, layer + 1), range(demo_kv.keys.shape[1]))
        raw += pages.spec.raw_bytes
        coded += encode(codec, pages).nbytes
        bits.append(bits_of_exponents(pages.gather()))
    assert raw / coded > 1.49
    assert raw / coded > 0.999 * 16 / (8 + np.mean(bits))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_grow_by_headers_alone(codec, dtype, shape):
    block = random_block(spec_of(shape, dtype))
    payload = encode(codec, in_pool(block, first_layer=0))
    assert payload.nbytes <= block.spec.raw_bytes + BODY + 3 * 15
    assert codec.encode(in_pool(block)).stats().values == block.keys.numel() + block.values.numel()


@pytest.fixture
def target():
    return in_pool(random_block(spec_of(SHAPES[1], "bfloat16"), 5), 6)


def refused(codec, payload, out, match=None):
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        codec.decode(0, [memoryview(payload)], out)
    assert bits_of(out.pools) == before


def test_wrong_headers_and_lengths_are_refused(codec, target):
    payload = encode(codec, in_pool(kv_block(SHAPES[1])))
    for index in range(BODY):
        for flip in (1, 0x80):
            torn = bytearray(payload)
            torn[index] ^= flip
            refused(codec, torn, target)


def test_more_records_than_pay_off_are_refused(codec, target):
    block = kv_block(SHAPES[1])
    payload = bytearray(encode(codec, in_pool(block)))
    struct.pack_into("<I", payload, 4, block.keys.numel() // 3)
    refused(codec, payload, target, "pay off")


def test_any_cut_is_refused(codec, target):
    payload = bytes(encode(codec, in_pool(kv_block(SHAPES[1]))))
    for end in [*range(BODY + 1), *range(BODY, len(payload), 97)]:
        refused(codec, payload[:end], target)
    refused(codec, payload + b"\0", target)


def test_flipped_bytes_are_refused_or_stay_in_their_pages(codec):
    pages = in_pool(kv_block(SHAPES[2]))
    payload = encode(codec, pages)
    others = in_pool(random_block(pages.spec, 5), 6)
    blank = copy_of(others)
    blank.scatter(kv_block(SHAPES[2], seed=9))
    for index in range(BODY, payload.nbytes):
        torn, out = bytearray(payload), copy_of(others)
        torn[index] ^= 0x55
        try:
            codec.decode(0, [memoryview(torn)], out)
        except CodecError:
            assert bits_of(out.pools) == bits_of(others.pools)
        out.scatter(kv_block(SHAPES[2], seed=9))
        assert bits_of(out.pools) == bits_of(blank.pools)


def golden_block():
    """Bits by a formula: exponents near 120 by channel, 1 in 64 far below, so that there are escapes."""
    spec = spec_of((2, 2, 16, 2, 20, 24), "bfloat16")
    tensors = []
    for salt, dim in ((1, spec.key_dim), (2, spec.value_dim)):
        index = np.arange(2 * 2 * 16 * 2 * dim, dtype=np.int64) * 2654435761 + salt
        mixed = index >> 7 ^ index >> 15
        exponents = 120 - np.arange(index.size) % dim % 5 - mixed % 4 - np.where(mixed % 64 == 5, 60, 0)
        bits = (mixed >> 3 & 1) << 15 | exponents << 7 | mixed >> 4 & 127
        tensor = torch.from_numpy(bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
        tensors.append(tensor.view(2, 2, 16, 2, dim))
    return Block(*tensors)


def test_golden_payload(codec):
    block, payload = golden_block(), (GOLDEN / f"{codec.name.replace('-', '_')}_bf16.bin").read_bytes()
    out = PagedBlock.whole(random_block(block.spec, 3))
    codec.decode(0, [memoryview(payload)], out)
    assert bits_of(out.pools) == bits_of(block)
    assert lengths_of(payload)[0] == block.keys.numel() and codec.encode(PagedBlock.whole(block)).stats().escapes
    assert payload == bytes(encode(codec, PagedBlock.whole(block)))
