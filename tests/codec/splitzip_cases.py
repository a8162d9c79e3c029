"""What SplitZip's backends are tested with: real-looking pages, a codebook, and the reference's payload."""

import numpy as np
import torch
from kv_blocks import random_block

from kvrail.codec.base import Block
from kvrail.codec.core.sections import aligned
from kvrail.codec.splitzip.one_stage.codebook import WINDOWS, Codebook, DtypeWindows, TensorWindows
from kvrail.codec.splitzip.one_stage.payload import Layout
from kvrail.codec.splitzip.tiles import reference
from kvrail.codec.splitzip.tiles.payload import Part, travels_raw
from kvrail.codec.splitzip.tiles.plan import plans_of

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


def reference_payload(pages, code, tops, codebook_id):
    """The payload that README.md asks for, value by value."""
    page_ids = np.array(pages.page_ids, dtype=np.int64)
    pools = [_matrices(pool) for pool in pages.layer_pools()]
    parts, dense_parts, escapes = [], [], []
    for pool, plan, tensor_tops in zip(pools, plans_of(pages.spec, code), tops, strict=False):
        coded = None
        if plan.fits and plan.values:
            dense = np.full(plan.fixed_bytes, 0xAB, dtype=np.uint8)
            records, extensions = reference.encode_tensor(pool, page_ids, plan, tensor_tops, dense)
            coded = None if travels_raw(plan, records.size, extensions.size) else (dense, records, extensions)
        if coded is None:
            parts.append(Part(plan, True, 0, 0))
            dense_parts.append(pool[:, page_ids].tobytes())
        else:
            parts.append(Part(plan, False, records.size, extensions.size))
            dense_parts.append(dense.tobytes())
            escapes += [records.tobytes(), extensions.tobytes()]
    scales = b"".join(pool[:, page_ids].tobytes() for pool in pools[2:])
    header = Layout(parts[0], parts[1], len(scales), codebook_id).header()
    pieces = (header, *dense_parts, scales, *escapes)
    return b"".join(piece.ljust(aligned(len(piece)), b"\0") for piece in pieces)


def reference_decode(payload, layout, tops, out):
    """Write the keys and values of a payload of which neither travels raw."""
    page_ids, source = np.array(out.page_ids, dtype=np.int64), np.frombuffer(payload, dtype=np.uint8)
    starts = zip(layout.parts, layout.dense_offsets, layout.escape_offsets, tops, out.layer_pools(), strict=False)
    for part, dense, records, tensor_tops, pool in starts:
        extensions = records + aligned(2 * part.records)
        reference.decode_tensor(
            source[dense : dense + part.dense_bytes],
            source[records : records + 2 * part.records].view("<u2"),
            source[extensions : extensions + part.extensions],
            page_ids,
            part.plan,
            tensor_tops,
            _matrices(pool),
        )


def _matrices(pool):
    """A pool's elements as bits, [layers, pages, rows, columns]; a view."""
    if pool.dtype == torch.float32:
        return pool.numpy()
    bits = pool.view(torch.uint8 if pool.element_size() == 1 else torch.uint16)
    return bits.flatten(3).numpy()
