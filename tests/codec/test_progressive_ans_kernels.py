"""splitzip-progressive-ans' Triton kernels in the interpreter: payloads are the CPU's, stages leave the same pages."""

import dataclasses

import numpy as np
import pytest
import torch
from kv_blocks import bits_of, copy_of, random_block, scattered, spec_of

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/codec/test_progressive_ans_gpu.py covers these kernels on a GPU", allow_module_level=True)

from progressive_ans_cases import coarse, pages_with_escapes, pieces_of

from kvrail.codec.base import CodecError
from kvrail.codec.splitzip.progressive_ans import cpu, gpu
from kvrail.codec.splitzip.progressive_ans.codec import ProgressiveAnsCodec
from kvrail.codec.splitzip.progressive_ans.payload import parse_first, parse_rest

CASES = [  # layers, pages, page_size, kv_heads, key_dim, value_dim; element type; kept bits; chunk
    ((1, 1, 64, 2, 64, 16), "bfloat16", (3, 1), 4096),  # enough codes to be coded, two values a word
    ((2, 1, 7, 3, 5, 9), "bfloat16", (1, 6), 4096),  # one value a word, tiles with padding
    ((1, 1, 16, 1, 32, 16), "bfloat16", (2, 3), 256),
    ((1, 1, 63, 1, 20, 12), "float16", (3, 2), 4096),
    ((1, 1, 16, 2, 32, 40), "float8_e5m2", (3, 1), 256),  # no second stage
    ((1, 1, 1, 1, 1, 1), "float8_e4m3fn", (3, 1), 4096),
    pytest.param((1, 2, 64, 2, 32, 32), "bfloat16", (3, 1), 4096, marks=pytest.mark.heavy),
    pytest.param((1, 1, 64, 2, 40, 32), "float16", (1, 2), 1024, marks=pytest.mark.heavy),
]


def decode(stage, payload, codec, out):
    """Decode a stage by the kernels."""
    source, plans = np.frombuffer(payload, dtype=np.uint8), codec._coding(out)
    layout = parse_first(source, out.spec, plans) if stage == 0 else parse_rest(source, plans)
    gpu.decode(stage, [source], [layout], plans, out)


def check(pages, codec, kept):
    """Encode by the kernels and decode stage by stage; the payloads."""
    encoding, expected = gpu.encode(pages, codec._coding(pages)), cpu.encode(pages, codec._coding(pages))
    payloads = encoding.stages()
    assert [bytes(payload) for payload in payloads] == [bytes(payload) for payload in expected.stages()]
    assert encoding.stats() == expected.stats()
    out = scattered(pages.spec, 99)
    wanted = copy_of(out)
    for stage, left in enumerate((coarse(pages.gather(), kept, payloads[1]), pages.gather())):
        decode(stage, payloads[stage], codec, out)
        wanted.scatter(left)
        assert bits_of(out.pools) == bits_of(wanted.pools)
    return payloads


@pytest.mark.parametrize(("shape", "dtype", "kept", "chunk"), CASES, ids=str)
def test_payloads_are_the_cpus_and_stages_leave_their_values(shape, dtype, kept, chunk):
    check(pages_with_escapes(spec_of(shape, dtype), 1), ProgressiveAnsCodec(kept, chunk), kept)


def test_one_tensor_raw_the_other_coded():
    pages = pages_with_escapes(spec_of((1, 1, 16, 1, 32, 48), "bfloat16"), 1)
    noise = random_block(pages.pools.spec, 7)
    pages = dataclasses.replace(pages, pools=dataclasses.replace(pages.pools, keys=noise.keys))
    payloads = check(pages, ProgressiveAnsCodec(), (3, 1))
    assert payloads[1][0] == 1


def test_a_corrupt_piece_leaves_the_pages_alone():
    pages, codec = pages_with_escapes(spec_of((1, 1, 64, 2, 64, 16), "bfloat16"), 1), ProgressiveAnsCodec()
    pieces, out = pieces_of(bytes(codec.encode(pages).stages()[0])), scattered(pages.spec, 2)
    part, before = bytearray(pieces.parts[1]), bits_of(out.pools)
    part[-70] ^= 1
    pieces.parts[1] = bytes(part)
    with pytest.raises(CodecError, match="coded piece"):
        decode(0, pieces.joined(), codec, out)
    assert bits_of(out.pools) == before
