"""Tensors to containers and back: entropy-coded byte planes, exponents apart from signs and mantissas (README.md)."""

import numpy as np
import torch
from xxhash import xxh3_64_intdigest as digest

from kvrail.codec.base import CodecError, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.host import host_bytes
from kvrail.codec.huffman import cpu
from kvrail.codec.huffman.format import FORMATS, Format
from kvrail.codec.huffman.payload import MAX_DIMENSIONS, Layout, parse


class HuffmanCodec:
    """The tensor codec `huffman`, on a CPU. Made once; any thread may use it."""

    name = "huffman"
    dtypes = frozenset(FORMATS)

    def encode(self, tensor: torch.Tensor, *, base: torch.Tensor | None = None, threads: int = 0) -> memoryview:
        """A container of `tensor`, of any shape, read-only.

        base: a tensor of the same shape and type, such as an earlier checkpoint's: what travels is their exclusive or,
        and decoding takes the same base. threads: 0: one a core, up to eight. What lies on a device is copied to the
        host first.
        Raises CodecError where the type is none of `dtypes`, or the base does not fit.
        """
        format = self._format(tensor)
        if base is not None and (base.shape != tensor.shape or base.dtype != tensor.dtype):
            raise CodecError(f"the base is {_describe(base)}, the tensor {_describe(tensor)}; give a base of the same")
        taken_off = None if base is None else _raw(base)
        shape, workers = tuple(tensor.shape), threads or cpu.default_threads()
        return cpu.encode(format, shape, _raw(tensor), taken_off, threads=workers)

    def encode_bytes(self, raw: Bytes, dtype: str, *, base: Bytes | None = None, threads: int = 0) -> memoryview:
        """A container of a flat tensor of `dtype` that has these bytes, uint8; the rest as in `encode`.

        Raises CodecError where there is no such type, the bytes are not whole elements, or the base has more or fewer.
        """
        format = FORMATS.get(dtype)
        if format is None or raw.size % format.item_bytes:
            raise CodecError(f"{raw.size} bytes are no elements of {dtype!r}; name one of {', '.join(FORMATS)}")
        if base is not None and base.size != raw.size:
            raise CodecError(f"the base has {base.size} bytes, the tensor {raw.size}; give a base of the same size")
        shape, workers = (raw.size // format.item_bytes,), threads or cpu.default_threads()
        return cpu.encode(format, shape, raw, base, threads=workers)

    def decode(self, payload: Payload, *, base: torch.Tensor | None = None, threads: int = 0) -> torch.Tensor:
        """The tensor of a container, in host memory. Raises CodecError that says what is wrong with it."""
        source = host_bytes(self.name, payload)
        layout = parse(source)
        out = cpu.fresh(layout.raw_bytes)
        taken_off = _base(layout, None if base is None else _raw(base))
        cpu.decode(layout, source, taken_off, out, threads=threads or cpu.default_threads())
        return torch.from_numpy(out).view(getattr(torch, layout.format.name)).reshape(layout.shape)

    def decode_into(self, payload: Payload, out: Bytes, *, base: Bytes | None = None, threads: int = 0) -> None:
        """Write a tensor's bytes into `out`, uint8, which must have as many and may begin anywhere.

        Raises CodecError as `decode`, and where the tensor has another size; what `out` has then means nothing.
        """
        source = host_bytes(self.name, payload)
        layout = parse(source)
        if layout.raw_bytes != out.size:
            raise CodecError(f"the tensor has {layout.raw_bytes} bytes, not the {out.size} that were expected")
        aligned = out if out.ctypes.data % layout.format.word_bytes == 0 else np.empty(out.size, np.uint8)
        cpu.decode(layout, source, _base(layout, base), aligned, threads=threads or cpu.default_threads())
        if aligned is not out:
            out[:] = aligned

    def _format(self, tensor: torch.Tensor) -> Format:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in FORMATS or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CodecError(f"{self.name} takes dense tensors of {', '.join(FORMATS)}, not {_describe(tensor)}")
        if tensor.dim() > MAX_DIMENSIONS:
            raise CodecError(f"{self.name} takes up to {MAX_DIMENSIONS} dimensions, not {tensor.dim()}; flatten some")
        return FORMATS[name]


def _base(layout: Layout, base: Bytes | None) -> Bytes | None:
    """The bytes of a base, checked to be the one that a container needs."""
    if layout.base_digest is None:
        if base is not None:
            raise CodecError("the container is no delta, but a base was given; decode it without")
        return None
    if base is None:
        raise CodecError("the container is a delta; decode it with the base that it was encoded with")
    if base.size != layout.raw_bytes or digest(base.data) != layout.base_digest:
        raise CodecError(
            f"the base of {base.size} bytes is not the one that this delta was encoded with; give that one"
        )
    return base


def _describe(tensor: torch.Tensor) -> str:
    kind = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}{kind}"


def _raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, uint8 [n]; a view where it is contiguous and on the host."""
    found = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    view: Bytes = found.view(torch.uint8).numpy()
    return view
