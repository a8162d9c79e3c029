"""The codecs `kvcomp` and `kvcomp-block`: error-bounded quantisation and Huffman codes in one lossy stage."""

from collections.abc import Sequence

import numpy as np
import torch

from kvrail.codec.base import Block, Encoding, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.backend import CheckedCodec
from kvrail.codec.core.floats import WIDE
from kvrail.codec.core.gpu import record, wait_for
from kvrail.codec.core.host import host_bytes, host_memory, to_device
from kvrail.codec.core.sections import StreamPart, joined
from kvrail.codec.papers.kvcomp.format import BLOCK_CODE, CHANNEL_CODE, KVCompCode
from kvrail.codec.papers.kvcomp.payload import Layout, parse, plans_of
from kvrail.codec.papers.kvcomp.plan import TensorPlan
from kvrail.codec.papers.kvcomp.torch_ops import dequantise, quantise


class _Tensor:
    """Keys or values on their way to the host: quantised on their device, on its current stream."""

    def __init__(self, tensor: torch.Tensor, plan: TensorPlan) -> None:
        self.plan = plan
        self._elements = tensor
        if not plan.uncodable:
            found = quantise(tensor, plan)
            self._escapes = found.escapes
            self._host = [_to_host(each) for each in (found.minima, found.scales, found.symbols)]

    def coded(self) -> tuple[StreamPart, bytes, bytes]:
        """StreamPart, fixed sections and what follows all sections; the work on the device is done."""
        if self.plan.uncodable:
            return self._raw()
        from kvrail.codec.papers.kvcomp.cpu import code  # compiles

        minima, scales, symbols = (each.numpy() for each in self._host)
        found = code(symbols, self.plan)
        positions = self._escapes.flatten().nonzero().flatten()
        part = StreamPart(self.plan, False, found.stream.size, positions.numel())
        if self.plan.travels_raw(part.words, part.escapes):
            return self._raw()
        elements = self._elements.flatten()[positions].cpu()
        fixed = (found.tables, minima.tobytes(), scales.tobytes(), found.lengths.tobytes(), found.ends.tobytes())
        numbers = positions.cpu().numpy().astype("<u4").tobytes()
        return part, joined(fixed), joined((found.stream.tobytes(), numbers, _bytes_of(elements).numpy().tobytes()))

    def _raw(self) -> tuple[StreamPart, bytes, bytes]:
        return StreamPart(self.plan, raw=True), joined((_bytes_of(self._elements).cpu().numpy().tobytes(),)), b""


class KVCompEncoding:
    """An encoding under way: quantised on the current stream, coded on the host by `stages`."""

    def __init__(self, pages: PagedBlock, plans: tuple[TensorPlan, TensorPlan]) -> None:
        gathered = pages.gather()
        self._tensors = [_Tensor(each, plan) for each, plan in zip(gathered.tensors(), plans, strict=True)]
        self._event = record(pages.device)
        self._payload, self._totals = b"", EncodingStats(sum(plan.values for plan in plans))

    def stages(self) -> list[Payload]:
        """Wait for the work, code the symbols and give the one payload."""
        wait_for(self._event)
        if self._tensors:
            keys, values = (each.coded() for each in self._tensors)
            parts = keys[0], values[0]
            self._payload = b"".join((Layout(parts).header(), keys[1], values[1], keys[2], values[2]))
            self._totals = EncodingStats(
                self._totals.values, sum(part.escapes for part in parts), sum(part.raw for part in parts)
            )
            self._tensors = []
        return [memoryview(self._payload)]

    def stats(self) -> EncodingStats:
        """What it came to, after `stages`."""
        return self._totals


class KVCompCodec(CheckedCodec):
    """Symbols by an error bound, coded with one Huffman code a layer; quantised on CPU and CUDA, coded on the CPU."""

    exact = False
    dtypes = frozenset(WIDE)

    def __init__(self, name: str, code: KVCompCode) -> None:
        self.name = name
        self.parameters_id = code.id
        self._code = code

    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding:
        return KVCompEncoding(pages, plans_of(pages.spec, self._code))

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        source = host_bytes(self.name, payloads[0])
        layout = parse(source, out.spec, self._code)
        places = zip(layout.parts, layout.offsets, layout.streams, strict=True)
        tensors = [
            _restored(part, source[start : start + part.fixed_bytes], source[stream:], out.device)
            for part, start, stream in places
        ]
        out.scatter(Block(*tensors))


def kvcomp(code: KVCompCode | None = None) -> KVCompCodec:
    """A scale a channel of a page for keys, a scale a token for values."""
    return KVCompCodec("kvcomp", code or CHANNEL_CODE)


def kvcomp_block() -> KVCompCodec:
    """One scale for all keys of a page of a layer, as the paper recommends; a scale a token for values."""
    return KVCompCodec("kvcomp-block", BLOCK_CODE)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start to copy a tensor's bytes to the host, on the current stream."""
    source = _bytes_of(tensor)
    host = host_memory(source.numel(), tensor.device)
    host.copy_(source, non_blocking=True)
    return host


def _restored(part: StreamPart, fixed: Bytes, stream: Bytes, device: torch.device) -> torch.Tensor:
    """Elements on `device`, shaped as the plan's shape, once their stream has been checked."""
    plan = part.plan
    if part.raw:
        return to_device(fixed[: plan.raw_bytes], device).view(plan.dtype).view(plan.shape)
    from kvrail.codec.papers.kvcomp.cpu import symbols_of  # compiles

    symbols = host_memory(plan.values, device)
    symbols_of(fixed, stream, part, symbols.numpy())
    minima, scales = (to_device(plan.sections[name].of(fixed), device) for name in ("minima", "scales"))
    tensor = dequantise(
        minima.view(plan.dtype).view(plan.unit_shape),
        scales.view(torch.bfloat16).view(plan.unit_shape),
        symbols.to(device, non_blocking=True).view(plan.shape),
        plan,
    )
    if part.escapes:
        positions, elements = part.escapes_of(stream)
        where = to_device(positions.astype(np.int64).view(np.uint8), device).view(torch.int64)
        tensor.view(-1).index_copy_(0, where, to_device(elements, device).view(plan.dtype))
    return tensor
