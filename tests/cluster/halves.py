"""A codec in two stages, small enough to see through: the first twelve bits of each bfloat16, then the last four."""

import numpy as np
import pytest
import torch

from kvrail.codec import registry
from kvrail.codec.base import Block, CodecError, EncodingStats, check_stage

LAST_BITS = 0x000F


class HalvesEncoding:
    def __init__(self, parts):
        self._parts = parts

    def stages(self):
        return [memoryview(part.tobytes()) for part in self._parts]

    def stats(self):
        return EncodingStats(self._parts[0].size)


class Halves:
    """Stage 0 has every value with its last four bits zero, stage 1 those bits, a byte each."""

    name = "halves"
    num_stages = 2
    exact = True
    device_payloads = False
    reads_earlier_payloads = True
    dtypes = frozenset({"bfloat16"})
    parameters_id = 0
    last_bits = LAST_BITS

    def encode(self, pages, *, on_device=False):
        bits = _bits(pages.gather())
        return HalvesEncoding([bits & ~LAST_BITS, (bits & self.last_bits).astype(np.uint8)])

    def decode(self, stage, payloads, out):
        check_stage(self, stage, payloads)
        block, bits = out.gather(), 0
        for payload, kind in zip(payloads, (np.int16, np.uint8), strict=False):
            part = np.frombuffer(payload, kind)
            if part.size != block.keys.numel() + block.values.numel():
                raise CodecError(f"a payload has {part.size} values; its block has another number")
            bits = bits | part
        _write(block, bits)
        out.scatter(block)


class LossyHalves(Halves):
    """The last stage brings two of the four bits."""

    name = "lossy-halves"
    exact = False
    last_bits = 0x000C


class Noise(Halves):
    """The first stage is garbage; the second brings everything, so that no draft is right but by chance."""

    name = "noise"

    def encode(self, pages, *, on_device=False):
        bits = _bits(pages.gather())
        garbage = np.random.default_rng(0).permutation(bits)
        return HalvesEncoding([garbage, bits])

    def decode(self, stage, payloads, out):
        check_stage(self, stage, payloads)
        block = out.gather()
        _write(block, np.frombuffer(payloads[stage], np.int16))
        out.scatter(block)


def _bits(block: Block) -> np.ndarray:
    """All bits of keys and values, int16 [n]."""
    return np.concatenate([t.contiguous().view(torch.int16).numpy().reshape(-1) for t in (block.keys, block.values)])


def _write(block: Block, bits: np.ndarray) -> None:
    end = block.keys.numel()
    for tensor, part in ((block.keys, bits[:end]), (block.values, bits[end:])):
        tensor.view(torch.int16).copy_(torch.from_numpy(part.astype(np.int16)).view(tensor.shape))


@pytest.fixture
def staged_codecs(monkeypatch):
    """The codecs of this module can be asked for by name."""
    for made in (Halves, LossyHalves, Noise):
        info = registry.CodecInfo(made.name, f"{__name__}:{made.__name__}", exact=made.exact)
        monkeypatch.setitem(registry._codecs, made.name, info)
