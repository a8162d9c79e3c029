"""What SplitZip's backends are tested with: real-looking pages, a codebook, and the reference's payload."""

import numpy as np
import torch
from kv_blocks import random_block

from kvrail.codec.base import Block
from kvrail.codec.splitzip.one_stage.codebook import WINDOWS, Codebook, DtypeWindows, TensorWindows
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.plan import plans_of
from tests.reference import one_stage as reference

TOPS = {"bfloat16": 131, "float16": 19, "float8_e5m2": 19, "float8_e4m3fn": 11}


def codebook(num_layers=8):
    """Tops near those of N(0, 1), other ones for each layer, and for values than for keys."""

    def windows(first):
        tops = tuple(first + layer % 3 for layer in range(num_layers))
        ones = (1.0,) * num_layers
        return TensorWindows(tops=tops, coverage=ones, best_set_coverage=ones, entropy_bits=ones)

    dtypes = {
        dtype: DtypeWindows(window=WINDOWS[dtype], tokens=1, keys=windows(top), values=windows(top - 1))
        for dtype, top in TOPS.items()
    }
    named = {"format": "kvrail-codebook", "version": 1, "model": "test", "model_fingerprint": "", "comment": ""}
    return Codebook(**named, num_layers=num_layers, shared=False, dtypes=dtypes)


def kv_block(spec, seed=0, outliers=0.01):
    """Normal values times a scale a channel; a fraction `outliers` has any exponent."""
    generator = torch.Generator().manual_seed(seed)
    noise = random_block(spec, seed)

    def kv(shaped):
        scales = torch.exp(torch.randn(shaped.shape[-2:], generator=generator))
        smooth = (torch.randn(shaped.shape, generator=generator) * scales).to(shaped.dtype)
        chosen = torch.rand(shaped.shape, generator=generator) < outliers
        return torch.where(chosen, shaped.view(int_type(shaped)), smooth.view(int_type(shaped))).view(shaped.dtype)

    return Block(kv(noise.keys), kv(noise.values), noise.key_scales, noise.value_scales)


def int_type(tensor):
    return torch.uint8 if tensor.element_size() == 1 else torch.int16


def reference_payload(pages, code, tops):
    """The payload that README.md asks for, value by value."""
    return bytes(reference.encode(pages, Coding(plans_of(pages.spec, code), tops)).stages()[0])


def reference_decode(payload, layout, tops, out):
    """Write a payload into `out`."""
    coding = Coding((layout.parts[0].plan, layout.parts[1].plan), tops)
    reference.decode(0, [np.frombuffer(payload, dtype=np.uint8)], [layout], coding, out)
