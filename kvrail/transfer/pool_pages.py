"""One request's pages in pools of torch tensors, as a transfer sees them: its source or its sink."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from kvrail.codec.base import Block, PagedBlock
from kvrail.transfer.streams import SideStream


class PoolPages:
    """Pages of a pool that only this transfer writes, or that do not change while it reads them.

    A sender reads, a receiver writes. Pages have logical numbers, from 0, and are held until the transfer has ended.
    pools: the whole pool as one block over all layers, or one block of one layer for each layer. pages: the pool's
    numbers, in the request's order. num_tokens: tokens of the prompt that the pages hold. Pages that enqueued work
    still uses may be given here: the transfer's work starts after what is enqueued now.
    """

    def __init__(self, pools: Sequence[Block], side: SideStream, pages: Sequence[int], num_tokens: int) -> None:
        self._pools = pools
        self._side = side
        self._pages = pages
        self._num_tokens = num_tokens
        self._indices: dict[tuple[int, int], torch.Tensor] = {}
        self._before = side.mark()

    def block(self, layers: range, first_page: int, end_page: int) -> PagedBlock:
        """Pages `first_page` to `end_page` - 1 of the request; inside `reading` or `writing`.

        Raises ValueError for several layers at once in a pool that has a block for each.
        """
        page_ids = self._pages[first_page:end_page]
        pool, layers = self._pool_of(layers)
        if not pool.keys.is_cuda:
            return PagedBlock(pool, layers, page_ids)
        index = self._indices.get((first_page, end_page))
        if index is None:  # once for all layers
            index = self._indices[first_page, end_page] = PagedBlock(pool, layers, page_ids).page_index()
        return PagedBlock(pool, layers, page_ids, index)

    def reading(self, ready: torch.Event | None) -> AbstractContextManager[None]:
        """Inside, work on the current stream reads pages, beside the engine's, as soon as `ready` has happened."""
        return self._side.after(ready)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, work on the current stream writes pages, after all that was enqueued when this object was made."""
        with self._side.after(self._before), torch.inference_mode():  # an engine's pools may be of that mode
            yield

    def fill_tail(self, layers: range) -> None:
        """Repeat the KV of the prompt's last token in the slots behind it, on the current stream.

        Those slots are never read, but they cross with their page. What another request left there should not cross,
        and zeros are the worst input for a codec.
        """
        pool, layers = self._pool_of(layers)
        last, used = divmod(self._num_tokens, pool.keys.shape[2])
        if not used:
            return
        for tensor in pool.tensors():
            slots = tensor[layers.start : layers.stop, self._pages[last]]
            slots[:, used:] = slots[:, used - 1 : used]

    def synchronize(self) -> None:
        """Wait until the transfer's work on the device is done: it reads and writes pages no more."""
        self._side.synchronize()

    def _pool_of(self, layers: range) -> tuple[Block, range]:
        """The block that holds `layers`, and their numbers in it."""
        if len(self._pools) == 1:
            return self._pools[0], layers
        if len(layers) != 1:
            raise ValueError(f"{layers} lie in pools of their own; a frame for this end holds one layer")
        return self._pools[layers.start], range(1)
