"""A codec in two stages, small enough to see through: the first twelve bits of each bfloat16, then the last four."""

import numpy as np
import pytest
import torch

from codec import registry
from codec.base import Block, CodecError, EncodingStats

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
    dtypes = frozenset({"bfloat16"})
    parameters_id = 0
    last_bits = LAST_BITS

    def encode(self, pages):
        bits = _bits(pages.gather())
        return HalvesEncoding([bits & ~LAST_BITS, (bits & self.last_bits).astype(np.uint8)])

    def decode(self, stage, payload, out):
        block = out.gather()
        bits = _bits(block)
        new = np.frombuffer(payload, np.int16 if stage == 0 else np.uint8)
        if new.size != bits.size:
            raise CodecError(f"a payload has {new.size} values; its block has {bits.size}")
        _write(block, new if stage == 0 else bits & ~LAST_BITS | new)
        out.scatter(block)


class LossyHalves(Halves):
    """The last stage brings two of the four bits."""

    name = "lossy-halves"
    exact = False
    last_bits = 0x000C


class Noise(Halves):
    """The first stage is garbage; the second brings everything, so that no draft is right but by chance."""

    name = "noise"

    def encode(self, pages):
        bits = _bits(pages.gather())
        garbage = np.random.default_rng(0).permutation(bits)
        return HalvesEncoding([garbage, bits])

    def decode(self, stage, payload, out):
        block = out.gather()
        _write(block, np.frombuffer(payload, np.int16))
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
        monkeypatch.setitem(registry._CODECS, made.name, (__name__, made.__name__, False))
    clear = registry.names.cache_clear
    clear()
    yield
    clear()
