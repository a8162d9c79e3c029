"""The quantisers of benchmarks/anchors.py, against formulas of one value at a time and against the real codec."""

import math

import pytest
import torch

from benchmarks.anchor_quantisers import (
    CHANNEL,
    TOKEN,
    coded,
    fixed_point,
    lynx,
    planes,
    residual_entropy,
    uniform,
)
from kvrail.codec import registry
from kvrail.codec.base import Block, PagedBlock

TOKENS, HEADS, DIM = 512, 2, 64
POINTS = [(0, 0, 0), (63, 1, 5), (64, 0, 63), (200, 1, 9), (511, 1, 63)]


@pytest.fixture(scope="module")
def kv() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = torch.randn(HEADS, DIM, generator=generator).exp()
    return (torch.randn(1, TOKENS, HEADS, DIM, generator=generator) * scales + scales).bfloat16()


def channel_top(kv: torch.Tensor, token: int, head: int, channel: int) -> int:
    """Exponent e of the power of two with 2^e <= largest magnitude of the channel's page < 2^(e + 1)."""
    start = token // 64 * 64
    return max(math.frexp(abs(float(v)))[1] - 1 for v in kv[0, start : start + 64, head, channel])


@pytest.mark.parametrize("mantissa", [0, 1, 3])
def test_planes_put_a_value_in_the_middle_of_its_interval(kv: torch.Tensor, mantissa: int) -> None:
    out = planes(mantissa)(kv).tensor
    for point in POINTS:
        value = float(kv[0][point])
        fraction, exponent = math.frexp(abs(value))
        exponent = max(exponent - 1, channel_top(kv, *point) - 7)
        part = math.floor((2 * fraction - 1) * 2**mantissa) + 0.5
        assert float(out[0][point]) == math.copysign((1 + part / 2**mantissa) * 2.0**exponent, value)


def test_all_planes_restore_every_bit(kv: torch.Tensor) -> None:
    exact = planes(7, escapes_first=True)(kv)
    assert torch.equal(exact.tensor.view(torch.int16), kv.view(torch.int16))
    assert exact.bits == pytest.approx(exact.total)


def test_an_escape_is_small_until_its_record_comes(kv: torch.Tensor) -> None:
    tiny = kv.clone()
    tiny[0, 3, 0, 0] = 1e-20
    coarse = planes(1)(tiny).tensor[0, 3, 0, 0]
    assert 0 < float(coarse) < 2.0 ** (channel_top(tiny, 3, 0, 0) - 6)


def test_planes_add_up_to_the_codec_s_payload(kv: torch.Tensor) -> None:
    pages = kv.view(1, -1, 64, HEADS, DIM)
    block = Block(pages, pages.clone())
    (payload,) = registry.get("splitzip-channel").encode(PagedBlock.whole(block)).stages()
    assert planes(1)(kv).total * 2 * kv.numel() / 8 == pytest.approx(len(payload), rel=0.003)


def test_a_first_stage_is_the_codec_s(kv: torch.Tensor) -> None:
    pages = kv.view(1, -1, 64, HEADS, DIM).clone()
    pages[0, 1, 5, 1, 7] = 0
    block, out = Block(pages, pages.clone()), Block(torch.empty_like(pages), torch.empty_like(pages))
    codec = registry.get("splitzip-progressive-ans")
    stages = codec.encode(PagedBlock.whole(block)).stages()
    codec.decode(0, [stages[0]], PagedBlock.whole(out))
    coarse = [coded(bits)(pages.view(kv.shape)) for bits in (3, 1)]
    for found, wanted in zip((out.keys, out.values), coarse, strict=True):
        assert torch.equal(found.view(torch.int16).flatten(), wanted.tensor.view(torch.int16).flatten())
    total = sum(each.total for each in coarse) * kv.numel() / 8
    models = 0.03  # frequencies and states, which weigh in a payload as small as this
    assert total <= sum(len(stage) for stage in stages) / (1 - models) and total == pytest.approx(
        sum(len(stage) for stage in stages), rel=0.003 + models
    )


@pytest.mark.parametrize("bits", [3, 5])
def test_fixed_point_cuts_the_channel_s_range_evenly(kv: torch.Tensor, bits: int) -> None:
    out = fixed_point(bits)(kv)
    for point in POINTS:
        value = float(kv[0][point])
        step = 2.0 ** (channel_top(kv, *point) + 2 - bits)
        expected = math.copysign((math.floor(abs(value) / step) + 0.5) * step, value)
        assert float(out.tensor[0][point]) == expected
    # Sign, mantissa and the exponent in unary, but for what stage 0 says already.
    assert 8 + 1 < out.total < 8 + 5


def test_int4_is_within_half_a_step(kv: torch.Tensor) -> None:
    for axis, groups in ((CHANNEL, kv.view(-1, 64, HEADS, DIM).transpose(1, 3)), (TOKEN, kv)):
        out = uniform(4, axis)(kv).tensor
        out = out.view(-1, 64, HEADS, DIM).transpose(1, 3) if axis == CHANNEL else out
        wide = groups.float().amax(-1 if axis == TOKEN else 3) - groups.float().amin(-1 if axis == TOKEN else 3)
        worst = (out.float() - groups.float()).abs().amax(-1 if axis == TOKEN else 3)
        assert (worst <= wide / 30 * 1.05 + 0.01 * groups.abs().max()).all()
        assert (worst > wide / 60).float().mean() > 0.9


def test_lynx_by_algorithm_1(kv: torch.Tensor) -> None:
    chunk, alpha = 32, 3.0
    out = {full: lynx(chunk, alpha, full=full)(kv).tensor for full in (False, True)}
    for token, head, channel in POINTS:
        page = kv[0, token // 256 * 256 :][:256, head, channel].double()
        low, scale = page.min(), page.max() - page.min()
        part = (page - low) / scale
        part = part[token % 256 // chunk * chunk :][:chunk]
        mean = part.mean()
        sigma = (part - mean).abs().max()
        centred = float((part[token % chunk] - mean) / sigma)
        index = round(math.log1p(alpha * abs(centred)) / math.log1p(alpha) * 120)
        for full, level in ((False, (index + 7) // 16 * 16), (True, index)):
            size = ((1 + alpha) ** (level / 120) - 1) / alpha
            expected = float((math.copysign(size, centred) * sigma + mean) * scale + low)
            assert float(out[full][0, token, head, channel]) == pytest.approx(expected, abs=0.012 * float(scale))


def test_residual_entropy_of_what_is_known(kv: torch.Tensor) -> None:
    assert residual_entropy(kv, kv) == pytest.approx(0, abs=1e-9)
    positive = kv.abs()
    lower = (positive.view(torch.int16) & ~3).view(torch.bfloat16)
    assert residual_entropy(positive, lower) == pytest.approx(2, abs=0.02)
