"""splitzip-progressive-ans on a CPU: payloads equal the reference's, a first stage the formula, a second restores."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_blocks import bits_of, copy_of, decode_stages, random_block, scattered, spec_of
from progressive_ans_cases import KEPT, coarse, every_pattern, kv_pages, pages_with_escapes, pieces_of
from test_splitzip import SHAPES, golden_pages

from kvrail.codec.base import Block, CodecError, PagedBlock
from kvrail.codec.core import cpu as core_cpu
from kvrail.codec.core.sections import HEADER_BYTES
from kvrail.codec.splitzip.entropy.codec import AnsCodec
from kvrail.codec.splitzip.one_stage.codec import splitzip_channel
from kvrail.codec.splitzip.progressive_ans.codec import ProgressiveAnsCodec
from kvrail.codec.splitzip.progressive_ans.payload import parse_first, parse_rest, uncoded_pieces
from kvrail.codec.splitzip.tiles.format import FORMATS
from tests.reference import entropy as rans
from tests.reference import progressive_ans as reference

GOLDEN = Path(__file__).parent / "golden"
PROPERTY = settings(max_examples=150 if os.environ.get("CI") == "true" else 40)
SIXTEEN = ["bfloat16", "float16"]
BODY = HEADER_BYTES + 40


def assert_equals_reference(pages, kept=(3, 1), chunk=4096):
    """Encode, decode stage by stage; give the stats and the payloads."""
    codec, before = ProgressiveAnsCodec(kept, chunk), copy_of(pages)
    encoding = codec.encode(pages)
    payloads = encoding.stages()
    wanted = reference.encode(pages, codec._coding(pages))
    assert [bytes(payload) for payload in payloads] == [bytes(payload) for payload in wanted.stages()]
    assert encoding.stats() == wanted.stats()
    assert bits_of(pages.pools) == bits_of(before.pools)
    out = scattered(pages.spec, 99)  # poisoned: random bits everywhere
    expected = copy_of(out)
    for stage, left in enumerate((coarse(pages.gather(), kept, payloads[1]), pages.gather())):
        codec.decode(stage, [payloads[stage]], out)
        expected.scatter(left)
        assert bits_of(out.pools) == bits_of(expected.pools)
    return encoding.stats(), payloads


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_equals_the_reference(dtype, kept, shape):
    assert_equals_reference(pages_with_escapes(spec_of(shape, dtype), 1), kept)


@PROPERTY
@given(
    dtype=st.sampled_from(sorted(FORMATS)),
    kept=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    chunk=st.sampled_from([256, 1024, 4096]),
    shape=st.tuples(
        st.integers(1, 2), st.integers(0, 3), st.integers(1, 20), *[st.integers(1, 3)], *[st.integers(1, 9)] * 2
    ),
    make=st.sampled_from([pages_with_escapes, kv_pages, scattered]),
    seed=st.integers(0, 1000),
)
def test_equals_the_reference_on_any_pages(dtype, kept, chunk, shape, make, seed):
    assert_equals_reference(make(spec_of(shape, dtype), seed), kept, chunk)


@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_pattern_survives(dtype, kept):
    block, codec = every_pattern(dtype), ProgressiveAnsCodec(kept)
    out, encoding = random_block(block.spec, 4), codec.encode(PagedBlock.whole(block))
    payloads = encoding.stages()
    assert encoding.stats().raw_tensors == (2 if dtype == "float8_e4m3fn" else 0)  # four bits of exponent are no fewer
    codec.decode(0, payloads[:1], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(coarse(block, kept, payloads[1]))
    codec.decode(1, payloads[1:], PagedBlock.whole(out))
    assert bits_of(out) == bits_of(block)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_reference_decodes_what_it_encodes(dtype, shape):
    pages, codec = pages_with_escapes(spec_of(shape, dtype), 8), ProgressiveAnsCodec((2, 3))
    plans, out = codec._coding(pages), scattered(pages.spec, 9)
    expected = copy_of(out)
    first, second = (np.frombuffer(each, dtype=np.uint8) for each in reference.encode(pages, plans).stages())
    layouts = parse_first(first, pages.spec, plans), parse_rest(second, plans)
    for stage, left in enumerate((coarse(pages.gather(), (2, 3), second), pages.gather())):
        reference.decode(stage, [(first, second)[stage]], [layouts[stage]], plans, out)
        expected.scatter(left)
        assert bits_of(out.pools) == bits_of(expected.pools)


@pytest.mark.parametrize("dtype", FORMATS)
def test_both_stages_come_to_one_stage_of_ans_and_a_second_header(dtype):
    pages = kv_pages(spec_of((2, 4, 64, 2, 64, 64), dtype), 3, outliers=0)
    payloads, (one,) = ProgressiveAnsCodec().encode(pages).stages(), AnsCodec().encode(pages).stages()
    assert sum(each.nbytes for each in payloads) == one.nbytes + HEADER_BYTES


def test_fewer_bytes_than_without_entropy_coding_and_half_of_them_in_the_first_stage():
    pages = kv_pages(spec_of((2, 16, 64, 4, 64, 64), "bfloat16"), 3, outliers=0)
    coded = [each.nbytes for each in ProgressiveAnsCodec().encode(pages).stages()]
    (plain,) = splitzip_channel().encode(pages).stages()
    assert sum(coded) < 0.95 * plain.nbytes
    assert coded[0] < 0.53 * plain.nbytes


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_bits_travel_raw_in_the_first_stage(dtype):
    pages, codec = scattered(spec_of((2, 3, 64, 2, 64, 64), dtype), 5), ProgressiveAnsCodec()
    encoding = codec.encode(pages)
    first, second = encoding.stages()
    assert first.nbytes <= pages.spec.raw_bytes + BODY + 3 * 16 and second.nbytes == HEADER_BYTES
    assert encoding.stats().raw_tensors == 2
    out = scattered(pages.spec, 6)
    for stage, payload in enumerate((first, second)):
        codec.decode(stage, [payload], out)
        assert bits_of(out.gather()) == bits_of(pages.gather())


@pytest.mark.parametrize("raw", ["keys", "values"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_one_tensor_raw_the_other_coded(dtype, raw):
    pages = kv_pages(spec_of((2, 2, 64, 2, 32, 48), dtype), 6, outliers=0)
    noise = random_block(pages.pools.spec, 7)
    pages = dataclasses.replace(pages, pools=dataclasses.replace(pages.pools, **{raw: getattr(noise, raw)}))
    stats, _ = assert_equals_reference(pages)
    assert stats.raw_tensors == 1


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_second_stage_changes_low_mantissa_bits_alone(dtype):
    """So pages may be read meanwhile, and a receiver need not keep the first stage's payload."""
    pages, codec = kv_pages(spec_of((2, 3, 16, 2, 24, 40), dtype), 4, outliers=0), ProgressiveAnsCodec((3, 2))
    payloads, out = codec.encode(pages).stages(), scattered(pages.spec, 5)
    expected, form = copy_of(out), FORMATS[dtype]
    codec.decode(1, payloads[1:], out)
    block, left = pages.gather(), expected.gather()
    tensors = []
    for exact, before, bits in ((block.keys, left.keys, 3), (block.values, left.values, 2)):
        low = (1 << form.mantissa_bits - bits) - 1
        both = before.view(torch.int16) & ~low | exact.view(torch.int16) & low
        tensors.append(both.view(exact.dtype))
    expected.scatter(Block(*tensors))
    assert bits_of(out.pools) == bits_of(expected.pools)
    assert not codec.reads_earlier_payloads


def test_an_encoder_may_have_coded_any_piece():
    pages, codec = kv_pages(spec_of((1, 2, 64, 2, 32, 32), "bfloat16"), 3, outliers=0), ProgressiveAnsCodec()
    for tensor in (pages.pools.keys, pages.pools.values):
        tensor.copy_(2.0 ** tensor.view(torch.int16).bitwise_and(1).float())  # significands all alike
    first, _ = codec.encode(pages).stages()
    pieces = pieces_of(bytes(first))
    for number in (0, 2):
        coded = rans.encode(np.frombuffer(pieces.parts[number], dtype=np.uint8))
        assert len(coded) < len(pieces.parts[number])
        pieces.parts[number] = coded
    plain, other = scattered(pages.spec, 5), scattered(pages.spec, 5)
    codec.decode(0, [first], plain)
    codec.decode(0, [memoryview(pieces.joined())], other)
    assert bits_of(plain.pools) == bits_of(other.pools)


@pytest.mark.parametrize("kept", [(0, 1), (1, 7)])
def test_bits_that_cannot_be_shown_are_refused(kept):
    with pytest.raises(ValueError, match="mantissa bits; choose 1 to 6"):
        ProgressiveAnsCodec(kept)


@pytest.mark.parametrize("dtype", FORMATS)
def test_many_threads_give_the_same_payloads(dtype, monkeypatch):
    pages = kv_pages(spec_of((3, 5, 48, 2, 40, 24), dtype), 10, outliers=0.0)
    codec = ProgressiveAnsCodec(chunk=1024)
    one = [bytes(stage) for stage in codec.encode(pages).stages()]
    monkeypatch.setattr(core_cpu, "BYTES_PER_THREAD", 1)
    monkeypatch.setattr(core_cpu, "MAX_THREADS", 3)
    out = scattered(pages.spec, 11)
    expected = copy_of(out)
    expected.scatter(pages.gather())
    assert [bytes(stage) for stage in codec.encode(pages).stages()] == one
    decode_stages(codec, [memoryview(payload) for payload in one], out)
    assert bits_of(out.pools) == bits_of(expected.pools)


def test_pool_that_is_not_contiguous_is_refused():
    block = random_block(spec_of((1, 2, 8, 2, 16, 16), "bfloat16"))
    pages, codec = PagedBlock.whole(block), ProgressiveAnsCodec()
    stages = codec.encode(pages).stages()
    wide = random_block(spec_of((1, 2, 8, 2, 32, 32), "bfloat16"))
    pages = PagedBlock.whole(Block(wide.keys[..., :16], wide.values[..., :16]))
    with pytest.raises(CodecError, match="not contiguous"):
        codec.encode(pages)
    for stage in range(2):
        with pytest.raises(CodecError, match="not contiguous"):
            codec.decode(stage, stages[: stage + 1], pages)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2"])
def test_golden_payloads(dtype):
    pages, codec = golden_pages(dtype), ProgressiveAnsCodec()
    out = dataclasses.replace(pages, pools=random_block(pages.pools.spec, 13))
    encoding = codec.encode(pages)
    golden = [(GOLDEN / f"splitzip_progressive_ans_{dtype}_{stage}.bin").read_bytes() for stage in range(2)]
    assert [bytes(stage) for stage in encoding.stages()] == golden
    assert encoding.stats().raw_tensors < 2 and encoding.stats().escapes
    decode_stages(codec, [memoryview(stage) for stage in golden], out)
    assert bits_of(out.gather()) == bits_of(pages.gather())


SPEC = spec_of((1, 2, 63, 2, 20, 24), "bfloat16")  # tiles with padding
CODEC = ProgressiveAnsCodec()
PAGES = pages_with_escapes(SPEC, 1)
PLANS = CODEC._coding(PAGES)
PAYLOADS = [bytes(stage) for stage in CODEC.encode(PAGES).stages()]
STAGES = [0, 1]


def test_the_payloads_themselves_are_coded_and_good():
    layout = parse_first(np.frombuffer(PAYLOADS[0], dtype=np.uint8), SPEC, PLANS)
    assert not any(part.raw for part in layout.inner.parts) and layout.inner.parts[0].records
    out = scattered(SPEC, 2)
    decode_stages(CODEC, [memoryview(payload) for payload in PAYLOADS], out)
    assert bits_of(out.gather()) == bits_of(PAGES.gather())


def assert_refused(stage, payload, match=None, codec=CODEC, spec=SPEC):
    out = scattered(spec, 2)
    before = bits_of(out.pools)
    with pytest.raises(CodecError, match=match):
        codec.decode(stage, [memoryview(payload)], out)
    assert bits_of(out.pools) == before


@pytest.mark.parametrize("stage", STAGES)
def test_any_other_header_byte_is_refused(stage):
    for offset in range(BODY if stage == 0 else HEADER_BYTES):
        for change in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            torn = bytearray(PAYLOADS[stage])
            torn[offset] ^= change
            assert_refused(stage, torn)


@pytest.mark.parametrize("stage", STAGES)
def test_any_truncation_or_extension_is_refused(stage):
    payload = PAYLOADS[stage]
    for end in {*range(0, len(payload), 97), HEADER_BYTES - 1, HEADER_BYTES, BODY, len(payload) - 1}:
        assert_refused(stage, payload[:end])
    assert_refused(stage, payload + bytes(16))


def test_flipped_bytes_are_refused_or_stay_in_their_pages():
    out, others = scattered(SPEC, 2), scattered(SPEC, 2)
    blank = copy_of(others)
    blank.scatter(random_block(SPEC, 9))
    for stage, payload in enumerate(PAYLOADS):
        for index in range(BODY, len(payload), 7):
            torn, out = bytearray(payload), copy_of(others)
            torn[index] ^= 0x55
            try:
                CODEC.decode(stage, [memoryview(torn)], out)
            except CodecError:
                assert bits_of(out.pools) == bits_of(others.pools)
            out.scatter(random_block(SPEC, 9))
            assert bits_of(out.pools) == bits_of(blank.pools)


@pytest.mark.parametrize("number", [1, 3])
def test_damage_in_a_coded_piece_is_refused(number):
    pieces, layout = pieces_of(PAYLOADS[0]), parse_first(np.frombuffer(PAYLOADS[0], np.uint8), SPEC, PLANS)
    place = uncoded_pieces(layout.inner, PLANS)[number]
    assert len(pieces.parts[number]) < place.stop - place.start
    part = bytearray(pieces.parts[number])
    part[-70] ^= 1
    pieces.parts[number] = bytes(part)
    assert_refused(0, pieces.joined(), "coded piece")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_another_cut_or_another_spec_is_not_taken(stage):
    assert_refused(stage, PAYLOADS[1 - stage])
    other = ProgressiveAnsCodec((2, 1)).encode(PAGES).stages()[stage]
    assert_refused(stage, other)
    changes = [{"key_dim": 21}, {"num_pages": 1}]
    if stage == 1:  # a first stage lies the same with both types; the frame's head names the type
        changes.append({"dtype": "float16"})
    for change in changes:
        assert_refused(stage, PAYLOADS[stage], spec=dataclasses.replace(SPEC, **change))


def test_a_second_stage_with_escapes_is_refused():
    torn = bytearray(PAYLOADS[1])
    torn[4] = 1
    assert_refused(1, torn, "a second stage says that it has escapes")
