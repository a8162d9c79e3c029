"""What launches on CUDA share: pages as bytes, what their addresses have in common, streams and events."""

import functools
import math
from collections.abc import Iterable

import torch

from kvrail.codec.base import CodecError, PagedBlock


def check_rows(pool: torch.Tensor) -> None:
    """Raise CodecError where the rows of a pool's pages are not contiguous."""
    page = pool[:1, :1]
    if page.numel() and not page.is_contiguous():
        raise CodecError(
            f"a pool's tensor of shape {tuple(pool.shape)} has strides {pool.stride()}; "
            "make the rows of a page contiguous"
        )


def byte_pools(pages: PagedBlock) -> list[torch.Tensor]:
    """The pool's tensors, cut to the layers chosen, as uint8 [layers, pool pages, bytes of a page]; views.

    Raises CodecError where the rows of a page are not contiguous.
    """
    pools = pages.layer_pools()
    for pool in pools:
        check_rows(pool)
    return [pool.flatten(2).view(torch.uint8) for pool in pools]


def alignment_of(pools: Iterable[torch.Tensor]) -> int:
    """Bytes, a power of two, 16 at most, that divides the addresses of all pages; pools: of `byte_pools`."""
    return math.gcd(16, *(number for pool in pools for number in (pool.data_ptr(), *pool.stride()[:2])))


def next_power_of_2(value: int) -> int:
    """The least power of two that is no smaller; 1 for 0."""
    return 1 << max(0, value - 1).bit_length()


def record(device: torch.device) -> torch.cuda.Event | None:
    """An event at the end of the device's current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: torch.cuda.Event | None) -> None:
    """Wait for an event of `record`."""
    if event is not None:
        event.synchronize()


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies that shall not wait for what else is queued; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
