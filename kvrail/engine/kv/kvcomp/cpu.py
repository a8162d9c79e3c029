"""What `CodedPages` does on a CPU."""

import numpy as np
import torch

from kvrail.engine.kv.kvcomp.cpu_kernels import close_pairs, open_tiles
from kvrail.engine.kv.kvcomp.form import KEYS, VALUES, share
from kvrail.engine.kv.kvcomp.pages import CodedPages, orders

_SHARES = np.array([share(code) for code in (*KEYS, *VALUES)], np.float32)
_TOPS = np.array([code.top for code in (*KEYS, *VALUES)], np.float32)


def close(
    closed: CodedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `CodedPages.close`."""
    layout, pair = closed.layout, closed.pair
    places = (*orders(pair.key_dim, True), *orders(pair.value_dim, False))
    sizes = (layout.page_size, layout.num_kv_heads, pair.key_dim, pair.value_dim)
    codes = closed.codes.view(-1).numpy().view(np.uint16)
    for *plain, pages in zip(keys, values, closed.pages, strict=True):
        bits = [pool.view(torch.int16).view(-1).numpy().view(np.uint16) for pool in plain]
        ids = (sources.numpy(), pages.view(-1).numpy(), targets.numpy())
        close_pairs(*bits, *ids, *sizes, *places, _SHARES, _TOPS, codes, pair.bytes, pair.room)


def open(
    closed: CodedPages, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `CodedPages.open`."""
    layout, begin = closed.layout, 0
    for pool, part in zip((keys, values), closed.pair.parts, strict=True):
        place = (layout.page_size, layout.num_kv_heads, part.dim, part.keys, *orders(part.dim, part.keys))
        for plain, pages in zip(pool, closed.pages, strict=True):
            open_tiles(
                pages.view(-1).numpy(),
                sources.numpy(),
                plain.view(torch.int16).view(-1).numpy().view(np.uint16),
                targets.numpy(),
                *place,
                closed.tables.view(-1).numpy(),
                begin,
                closed.pair.bytes,
            )
        begin += part.bytes
