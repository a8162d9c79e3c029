"""The codecs `int8` and `int4`: uniform quantisation in one lossy stage."""

from collections.abc import Sequence

import numpy as np
import torch

from kvrail.codec.base import Block, Encoding, EncodingStats, PagedBlock, Payload
from kvrail.codec.core.arrays import Bytes
from kvrail.codec.core.backend import CheckedCodec
from kvrail.codec.core.floats import WIDE
from kvrail.codec.core.gpu import record, wait_for
from kvrail.codec.core.host import host_bytes, host_memory, to_device
from kvrail.codec.integer.format import INT4, INT8, Codes
from kvrail.codec.integer.payload import Layout, Part, parse, plans_of, raw_pages_of
from kvrail.codec.integer.plan import TensorPlan
from kvrail.codec.integer.torch_ops import dequantise, quantise


class IntegerEncoding:
    """An encoding under way on the current stream.

    All sections come to the host at once; raw pages, which finite KV does not have, when `stages` has seen their flags.
    """

    def __init__(self, pages: PagedBlock, plans: tuple[TensorPlan, TensorPlan]) -> None:
        gathered = pages.gather()
        self._tensors = [gathered.keys, gathered.values]
        self._layout = Layout((Part(plans[0], plans[0].travels_raw(0)), Part(plans[1], plans[1].travels_raw(0))))
        self._host = host_memory(self._layout.size, pages.device)
        for part, tensor, start in zip(self._layout.parts, self._tensors, self._layout.offsets, strict=True):
            if part.raw:
                _fill(self._host[start:], tensor)
                continue
            for name, section in quantise(tensor, part.plan).items():
                _fill(self._host[start + part.plan.sections[name].offset :], section)
        self._event = record(pages.device)

    def stages(self) -> list[Payload]:
        """Wait for the work and give the one payload."""
        wait_for(self._event)
        if self._tensors:
            self._add_raw_pages()
            self._tensors = []
        return [self._host.numpy().data]

    def stats(self) -> EncodingStats:
        """What it came to, after `stages`; escapes: values of raw pages."""
        parts = self._layout.parts
        return EncodingStats(
            sum(part.plan.values for part in parts),
            sum(part.raw_pages * part.plan.page_values for part in parts),
            sum(part.raw for part in parts),
        )

    def _add_raw_pages(self) -> None:
        """Put pages that are not finite behind the sections, or their tensor in place of these."""
        before, sections = self._layout, self._host
        parts, found = [], []
        for part, start in zip(before.parts, before.offsets, strict=True):
            numbers = raw_pages_of(sections.numpy()[start:], part.plan)
            raw = part.raw or part.plan.travels_raw(numbers.size)
            parts.append(Part(part.plan, raw, 0 if raw else numbers.size))
            found.append(torch.from_numpy(numbers))
        self._layout = Layout((parts[0], parts[1]))
        if self._layout != before:
            self._host = host_memory(self._layout.size, torch.device("cpu"))
            for number, (part, start) in enumerate(zip(parts, before.offsets, strict=True)):
                tensor, target = self._tensors[number], self._host[self._layout.offsets[number] :]
                _fill(target, tensor if part.raw else sections[start : start + part.fixed_bytes])
                if part.raw_pages:
                    pages = tensor.flatten(0, 1).index_select(0, found[number].to(tensor.device))
                    _fill(self._host[self._layout.streams[number] :], pages)
        self._layout.complete(self._host.numpy())


class IntegerCodec(CheckedCodec):
    """Codes of eight or four bits, with a minimum and a scale a group; on CPU and CUDA."""

    exact = False
    dtypes = frozenset(WIDE)

    def __init__(self, name: str, codes: Codes) -> None:
        self.name = name
        self._codes = codes

    def _encode(self, pages: PagedBlock, on_device: bool) -> Encoding:
        return IntegerEncoding(pages, plans_of(pages.spec, self._codes))

    def _decode(self, stage: int, payloads: Sequence[Payload], out: PagedBlock) -> None:
        source = host_bytes(self.name, payloads[0])
        layout = parse(source, out.spec, self._codes)
        uploaded = to_device(source, out.device)
        starts = zip(layout.parts, layout.offsets, layout.streams, strict=True)
        out.scatter(Block(*(_restored(source, uploaded, *each) for each in starts)))


def int8() -> IntegerCodec:
    """Eight bits a value, minimum and scale a token and head."""
    return IntegerCodec("int8", INT8)


def int4() -> IntegerCodec:
    """Four bits a value, minimum and scale a channel of a page for keys, a token and head for values."""
    return IntegerCodec("int4", INT4)


def _restored(source: Bytes, uploaded: torch.Tensor, part: Part, start: int, tail: int) -> torch.Tensor:
    """Keys or values, on the device; source: the payload on the host, uploaded: the same on the device."""
    plan, fixed = part.plan, uploaded[start:]
    if part.raw:
        return fixed[: plan.raw_bytes].view(plan.dtype).view(plan.shape)
    minima, scales, codes = (plan.sections[name].of(fixed) for name in ("minima", "scales", "codes"))
    tensor = dequantise(
        minima.view(plan.dtype).view(plan.group_shape),
        scales.view(plan.scale_dtype).view(plan.group_shape),
        codes.view(plan.pages, plan.code_bytes),
        plan,
    )
    if part.raw_pages:
        numbers = to_device(raw_pages_of(source[start:], plan).view(np.uint8), tensor.device).view(torch.int64)
        pages = uploaded[tail : tail + part.raw_pages * plan.page_bytes].view(plan.dtype)
        tensor.view(plan.pages, -1).index_copy_(0, numbers, pages.view(part.raw_pages, -1))
    return tensor


def _fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Start to copy a tensor's bytes to the beginning of `target`, on the current stream."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    target[: flat.numel()].copy_(flat, non_blocking=True)
