"""Where pages come from and where they go: what an engine shows of one request's pages."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kvrail.codec.base import PagedBlock


class PageSource(Protocol):
    """One request's pages, held until its transfer has ended. Pages have logical numbers, from 0."""

    def block(self, layers: range, first_page: int, end_page: int) -> PagedBlock:
        """Pages `first_page` to `end_page` - 1 of `layers` where they lie."""
        ...

    def reading(self, ready: torch.Event | None) -> AbstractContextManager[None]:
        """Inside, work on the current stream reads pages, beside the engine's, as soon as `ready` has happened."""
        ...

    def fill_tail(self, layers: range) -> None:
        """Put something harmless behind the prompt's last token into its last page; inside `reading`."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing of this side reads pages any more."""
        ...


class PageSink(Protocol):
    """One request's pages, reserved for a transfer that alone writes them. Pages have logical numbers, from 0."""

    def block(self, layers: range, first_page: int, end_page: int) -> PagedBlock:
        """Pages `first_page` to `end_page` - 1 of `layers` where they lie."""
        ...

    def writing(self) -> AbstractContextManager[None]:
        """Inside, work on the current stream writes pages, after what still used them from before."""
        ...

    def synchronize(self) -> None:
        """Wait until all work that was enqueued in `writing` is done."""
        ...
