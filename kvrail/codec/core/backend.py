"""What codecs of KV pages share: checks of what they are given, and the work on one kind of device behind them."""

import importlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from kvrail.codec.base import Codec, CodecError, Encoding, PagedBlock, Payload, check_stage
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
    return importlib.import_module(f"{package}.gpu" if device.type == "cuda" else f"{package}.cpu")


class CheckedCodec(Codec):
    """A codec of KV pages that does in `_encode` and `_decode` what it is asked for, once that has been checked."""

    def encode(self, pages: PagedBlock, *, on_device: bool = False) -> Encoding:
        """Launch the encoding on the pages' device: on CUDA on its current stream, on a CPU at once.

        Raises CodecError where the element type is none of `dtypes`, a pool's tensor does not lie as the device takes
        it, or a codebook has no such layer; ValueError where payloads are to stay `on_device` and cannot.
        """
        if on_device and not self.device_payloads:
            raise ValueError(f"{self.name} makes payloads in host memory alone; encode without on_device")
        if on_device and pages.device.type != "cuda":
            raise ValueError(f"the pages lie on {pages.device}, not on a CUDA device; encode without on_device")
        self._check_dtype(pages)
        return self._encode(pages, on_device)

    def decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        """Check all of the payloads that a stage needs, then write it into `out`, on its device's current stream.

        Raises CodecError, with `out` untouched, where a payload is not one of this codec, parameters, spec and stage.
        """
        check_stage(self, stage, payloads)
        self._check_dtype(out)
        self._decode(stage, payloads, out)

    def _check_dtype(self, pages: PagedBlock) -> None:
        if pages.spec.dtype not in self.dtypes:
            taken = ", ".join(sorted(self.dtypes))
            raise CodecError(f"{self.name} does not take dtype {pages.spec.dtype}; it takes {taken}")

    @abstractmethod
    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding: ...

    @abstractmethod
    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None: ...


class BackendCodec(CheckedCodec):
    """A codec of KV pages whose work the Backend of its package does."""

    package: str

    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding:
        backend: Backend[Any, Any] = backend_of(self.package, pages.device)
        return backend.encode(pages, self._coding(pages))

    @abstractmethod
    def _coding(self, pages: PagedBlock) -> Any:
        """What both ends know of a block of pages before any of its bytes."""
