"""What does a codec's work on one kind of device."""

import functools
import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from kvrail.codec.base import Codec, Encoding, PagedBlock, check_dtype, check_place
from kvrail.codec.core.arrays import Bytes

Coding = TypeVar("Coding", contravariant=True)
Layout = TypeVar("Layout", contravariant=True)


class Backend(Protocol[Coding, Layout]):
    """A module of a codec, `cpu` or `gpu`, whose functions these are; mypy holds each to it in codec.py.

    Coding: what both ends know of a block before any of its bytes: plans and parameters. Layout: what payload.py found,
    and checked, in a payload's header. All backends of a codec make the same bytes and write the same values.
    """

    def encode(self, pages: PagedBlock, coding: Coding, /) -> Encoding:
        """Launch the encoding of `pages` on their device's current stream; on a CPU at once.

        Raises CodecError where a pool's tensor lies so that the backend cannot read it.
        """
        ...

    def decode(
        self, stage: int, payloads: Sequence[Bytes], layouts: Sequence[Layout], coding: Coding, out: PagedBlock, /
    ) -> None:
        """Write stage `stage` into `out` on its device's current stream; on a CPU at once.

        payloads, layouts: of the stages from which it is decoded, in order, in host memory. Raises CodecError, with
        `out` untouched, where a pool's tensor lies so that the backend cannot write it.
        """
        ...


def backend_of(package: str, device: torch.device) -> Any:
    """The Backend of a codec's package on `device`: imported with the first page there, since it compiles."""
    return _module(f"{package}.gpu" if device.type == "cuda" else f"{package}.cpu")


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


class BackendCodec(Codec):
    """A codec of KV pages whose work the Backend of its package does."""

    package: str

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes`, a pool's tensor does not lie as the device takes
        it, or a codebook has no such layer; ValueError where payloads are to stay `on_device`.
        """
        check_place(self, pages, on_device)
        check_dtype(self, pages)
        backend: Backend[Any, Any] = backend_of(self.package, pages.device)
        return backend.encode(pages, self._coding(pages))

    @abstractmethod
    def _coding(self, pages: PagedBlock) -> Any:
        """What both ends know of a block of pages before any of its bytes."""
