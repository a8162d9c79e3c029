"""SplitZip on CUDA: the host's part of a payload. gpu_launch.py has the device's."""

import functools
from collections.abc import Sequence

from kvrail.codec.base import PagedBlock
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.gpu import byte_pools
from kvrail.codec.core.host import to_device
from kvrail.codec.splitzip.one_stage.gpu_launch import launch_decode, launch_encode
from kvrail.codec.splitzip.one_stage.plan import Coding
from kvrail.codec.splitzip.tiles.gpu import GpuEncoding
from kvrail.codec.splitzip.tiles.gpu_launch import EncodeBuffers, make_table
from kvrail.codec.splitzip.tiles.payload import Layout, Part, scale_bytes_of


def encode(pages: PagedBlock, coding: Coding) -> GpuEncoding:
    """Launch the encoding of keys and values on the current stream.

    Raises CodecError where the rows of a page are not contiguous.
    """
    plans, scale_bytes = coding.plans, scale_bytes_of(pages.spec)
    table = make_table(pages, coding.tops)
    buffers = EncodeBuffers.allocate(plans, scale_bytes, pages.device)
    launch_encode(pages, plans, table, buffers)
    return GpuEncoding(pages, plans, table, buffers, functools.partial(_layout, scale_bytes))


def _layout(scale_bytes: int, parts: list[Part]) -> Layout:
    """The payload's layout, given what became of keys and values."""
    return Layout((parts[0], parts[1]), scale_bytes)


def decode(stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock) -> None:
    """Write the one payload into `out` on the current stream; every record must lie on a value.

    Raises CodecError, with `out` untouched, where the rows of a page are not contiguous.
    """
    (payload,), (layout,) = payloads, layouts
    byte_pools(out)
    launch_decode(to_device(payload, out.device), layout, make_table(out, coding.tops), out)
