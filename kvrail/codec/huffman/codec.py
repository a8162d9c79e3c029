"""Tensors to containers and back: entropy-coded byte planes, exponents apart from signs and mantissas (README.md)."""

import math

import torch

from kvrail.codec.base import CodecError, Payload
from kvrail.codec.host import host_bytes
from kvrail.codec.huffman import cpu
from kvrail.codec.huffman.formats import FORMATS, Format
from kvrail.codec.huffman.payload import MAGIC, MAX_DIMENSIONS, Bytes, Layout, digest, join, parse


class HuffmanCodec:
    """The tensor codec `huffman`, on a CPU. Made once; any thread may use it."""

    name = "huffman"
    magic = MAGIC
    dtypes = frozenset(FORMATS)

    def encode(
        self, tensor: torch.Tensor, *, base: torch.Tensor | None = None, static: bool = False, threads: int = 0
    ) -> bytes:
        """A container of `tensor`, of any shape.

        base: a tensor of the same shape and type, such as an earlier checkpoint's: what travels is their exclusive or,
        and decoding takes the same base. static: chunks share one code where it suits them, which is quicker to decode
        and slower to make. threads: 0: one a core, up to eight. What lies on a device is copied to the host first.
        Raises CodecError where the type is none of `dtypes`, or the base does not fit.
        """
        format = self._format(tensor)
        if base is not None and (base.shape != tensor.shape or base.dtype != tensor.dtype):
            raise CodecError(f"the base is {_describe(base)}, the tensor {_describe(tensor)}; give a base of the same")
        raw = _raw(tensor)
        taken_off = None if base is None else _raw(base)
        layout, chunks = cpu.encode(
            format, tuple(tensor.shape), raw, taken_off, static=static, threads=threads or cpu.default_threads()
        )
        return join(layout, chunks)

    def decode(self, payload: Payload, *, base: torch.Tensor | None = None, threads: int = 0) -> torch.Tensor:
        """The tensor of a container, in host memory. Raises CodecError that says what is wrong with it."""
        source = host_bytes(self.name, payload)
        layout = parse(source)
        out = torch.empty(layout.raw_bytes, dtype=torch.uint8)
        taken_off = self._base(layout, base)
        cpu.decode(layout, source, taken_off, out.numpy(), threads=threads or cpu.default_threads())
        return out.view(getattr(torch, layout.format.name)).reshape(layout.shape)

    def decode_range(
        self, payload: Payload, start: int, stop: int, *, base: torch.Tensor | None = None, threads: int = 0
    ) -> torch.Tensor:
        """Elements `start` to `stop` of the flattened tensor, in one dimension; only chunks that have them are decoded.

        Raises CodecError as `decode`, and where there are no such elements.
        """
        source = host_bytes(self.name, payload)
        layout = parse(source)
        if not 0 <= start <= stop <= math.prod(layout.shape):
            raise CodecError(f"elements {start} to {stop} are not in a tensor of {math.prod(layout.shape)}")
        item, size = layout.format.item_bytes, layout.chunk_bytes
        chunks = range(start * item // size, -(-stop * item // size) if start < stop else start * item // size)
        first = chunks.start * size
        out = torch.empty(max(0, min(chunks.stop * size, layout.raw_bytes) - first), dtype=torch.uint8)
        taken_off = self._base(layout, base)
        cpu.decode(layout, source, taken_off, out.numpy(), chunks=chunks, threads=threads or cpu.default_threads())
        return out[start * item - first : stop * item - first].view(getattr(torch, layout.format.name))

    def _format(self, tensor: torch.Tensor) -> Format:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in FORMATS or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CodecError(f"{self.name} takes dense tensors of {', '.join(FORMATS)}, not {_describe(tensor)}")
        if tensor.dim() > MAX_DIMENSIONS:
            raise CodecError(f"{self.name} takes up to {MAX_DIMENSIONS} dimensions, not {tensor.dim()}; flatten some")
        return FORMATS[name]

    def _base(self, layout: Layout, base: torch.Tensor | None) -> Bytes | None:
        if layout.base_digest is None:
            if base is not None:
                raise CodecError("the container is no delta, but a base was given; decode it without")
            return None
        if base is None:
            raise CodecError("the container is a delta; decode it with the base that it was encoded with")
        raw = _raw(base)
        if raw.size != layout.raw_bytes or digest(raw) != layout.base_digest:
            raise CodecError(
                f"the base, {_describe(base)}, is not the one that this delta was encoded with; give that one"
            )
        return raw


def _describe(tensor: torch.Tensor) -> str:
    kind = "" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}{kind}"


def _raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, uint8 [n]; a view where it is contiguous and on the host."""
    found = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
    view: Bytes = found.view(torch.uint8).numpy()
    return view
