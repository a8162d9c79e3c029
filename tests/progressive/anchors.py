"""Codecs whose last stage is exact and whose first one is broken."""

import numpy as np
import pytest

from kvrail.codec import registry
from kvrail.codec.base import check_stage
from tests.cluster.halves import Halves, HalvesEncoding, _bits, _write


class AllNoise(Halves):
    """The first stage is random numbers between -2 and 2; the second brings everything."""

    name = "all-noise"

    def encode(self, pages, *, on_device=False):
        bits = _bits(pages.gather())
        return HalvesEncoding([self.anchor(bits), bits])

    def anchor(self, bits):
        return np.random.default_rng(0).integers(-(1 << 15), 1 << 15, bits.shape, np.int16) & ~0x4000

    def decode(self, stage, payloads, out):
        check_stage(self, stage, payloads)
        block = out.gather()
        _write(block, np.frombuffer(payloads[stage], np.int16))
        out.scatter(block)


class HalfRight(AllNoise):
    """The first stage has two bits of each mantissa, so that about half of the drafts are wrong."""

    name = "half-right"

    def anchor(self, bits):
        return bits & ~0x001F


class NoNumbers(AllNoise):
    """The first stage is NaN, from which no draft can be made."""

    name = "no-numbers"

    def anchor(self, bits):
        return np.full_like(bits, 0x7FC0)


BROKEN = (AllNoise, HalfRight, NoNumbers)


@pytest.fixture
def broken_anchors(monkeypatch):
    """The codecs of this module can be asked for by name."""
    for made in BROKEN:
        info = registry.CodecInfo(made.name, f"{__name__}:{made.__name__}", exact=made.exact)
        monkeypatch.setitem(registry._codecs, made.name, info)
