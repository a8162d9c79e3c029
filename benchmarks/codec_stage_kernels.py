"""Kernels of Lynx, one step after the other: pages to payloads in device memory and back.

The gate: of a few pages the GPU makes the same payloads as the CPU and both put the same into pages, stage by stage;
of the whole block the launches that are timed leave what the codec sends, and pages as the codec leaves them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.codec_trials import GateError, poisoned, timed
from kvrail.codec import registry
from kvrail.codec.base import Block, Codec, PagedBlock
from kvrail.codec.papers.lynx import payload as lynx
from kvrail.codec.papers.lynx.format import LynxCode
from kvrail.codec.papers.lynx.payload import ANCHOR, EXACT, RESIDUAL
from kvrail.codec.papers.lynx.plan import TensorPlan

CODECS = ("lynx", "lynx-exact")
SMALL_PAGES = 2
"""Values of each layer that are compared with the CPU's."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a codec, which needs what the steps before it left.

    moved: bytes that it reads and writes at the least; pairs: tensors that are equal once it is launched, but for
    `left` bytes, which it leaves to the host.
    """

    name: str
    launch: Callable[[], Any]
    moved: int
    pairs: Pairs
    left: int = 0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step came to; seconds are medians for the whole block."""

    codec: str
    step: str
    raw_bytes: int
    moved_bytes: int
    seconds: float
    copy_seconds: float

    @property
    def rate(self) -> float:
        """GB/s of uncompressed KV."""
        return self.raw_bytes / self.seconds / 1e9

    @property
    def limit(self) -> float:
        """GB/s of uncompressed KV if the step moved its bytes at the copy's speed."""
        return 2 * self.raw_bytes / self.copy_seconds / 1e9 * self.raw_bytes / self.moved_bytes


class Coded:
    """A block as a codec sends it: payloads on the host and on the block's device, and pages after each stage."""

    def __init__(self, codec: Codec, block: Block) -> None:
        """Encode and decode; raises GateError where an exact codec does not give every bit back."""
        stages = codec.encode(PagedBlock.whole(block)).stages()
        self.host = [np.frombuffer(bytearray(stage), dtype=np.uint8) for stage in stages]
        self.device = [torch.from_numpy(stage).to(block.keys.device) for stage in self.host]
        self.pages, out = [], poisoned(block)
        for number in range(len(self.host)):
            codec.decode(number, [stage.data for stage in self.host[: number + 1]], PagedBlock.whole(out))
            self.pages.append(Block(*(tensor.clone() for tensor in out.tensors())))
        if codec.exact:
            _require_equal(f"{codec.name}, sent and got", _pairs(out, block))


def measure(name: str, block: Block, runs: int) -> list[StepFigures]:
    """The gate, then `runs` timed runs of all steps and of a copy in turn; raises GateError."""
    codec = registry.get(name)
    _check_against_cpu(codec, block)
    coded, out = Coded(codec, block), poisoned(block)
    steps = lynx_steps(block, out, coded)
    for step in steps:
        step.launch()
        _require_equal(f"{name}, {step.name}", step.pairs, step.left)
    *seconds, copy_seconds = timed(block, [step.launch for step in steps], runs)
    return [
        StepFigures(name, step.name, block.spec.raw_bytes, step.moved, each, copy_seconds)
        for step, each in zip(steps, seconds, strict=True)
    ]


def lynx_steps(block: Block, out: Block, coded: Coded) -> list[Step]:
    """Both stages from the pages, in one pass; the first into `out`; both into `out`, whatever lies there.

    Then, where there is a third stage, its encoding and its decoding into `out`.
    """
    from kvrail.codec.core.gpu import byte_pools
    from kvrail.codec.papers.lynx import gpu_launch

    source, code = PagedBlock.whole(block), LynxCode()
    pools, targets = (byte_pools(pages) for pages in (source, PagedBlock.whole(out)))
    plans, table = lynx.plans_of(block.spec, code), source.page_index()
    layouts = [lynx.parse(stage, block.spec, code, number) for number, stage in enumerate(coded.host)]
    fixed = [_fixed(layout, stage) for layout, stage in zip(layouts, coded.device, strict=True)]
    dense = [[torch.zeros_like(part) for part in fixed[stage]] for stage in (ANCHOR, RESIDUAL)]
    made = [pair for stage in (ANCHOR, RESIDUAL) for pair in zip(dense[stage], fixed[stage], strict=True)]
    raw, sizes = block.spec.raw_bytes, [stage.size for stage in coded.host]
    codes = sum(plan.sections[RESIDUAL]["codes"].size for plan in plans)  # what residuals add to anchors

    def encode() -> None:
        gpu_launch.launch_encode(pools, table, plans, dense)

    def decode_anchor() -> None:
        gpu_launch.launch_decode(targets, table, plans, fixed[:RESIDUAL])

    def decode_both() -> None:
        gpu_launch.launch_decode(targets, table, plans, fixed[:EXACT])

    steps = [
        Step("encode", encode, raw + sizes[ANCHOR] + sizes[RESIDUAL], made),
        Step("anchor", decode_anchor, sizes[ANCHOR] + raw, _pairs(out, coded.pages[ANCHOR])),
        Step("second", decode_both, sizes[ANCHOR] + codes + raw, _pairs(out, coded.pages[RESIDUAL])),
    ]
    if len(layouts) > EXACT:
        steps += _exact_steps(pools, targets, table, plans, dense, layouts[EXACT], coded)
    return steps


def _exact_steps(
    pools: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    table: torch.Tensor,
    plans: Sequence[TensorPlan],
    dense: Sequence[Sequence[torch.Tensor]],
    layout: lynx.Layout,
    coded: Coded,
) -> list[Step]:
    """The third stage from the pages and the two before it; and into pages that hold these, but for its escapes."""
    from kvrail.codec.papers.lynx import gpu_launch

    if any(part.raw for part in layout.parts):
        raise GateError("lynx-exact brings this KV as it is: there is nothing to time")
    payload = coded.device[EXACT]
    fixed = _fixed(layout, payload)
    words = [payload[start:][: 4 * part.words] for part, start in zip(layout.parts, layout.streams, strict=True)]
    buffers = [gpu_launch.ExactBuffers.allocate(plan, payload.device) for plan in plans]
    made = []
    for each, part, ours, theirs in zip(buffers, layout.parts, fixed, words, strict=True):
        each.dense.zero_()
        counts = torch.tensor([part.words, part.escapes], device=payload.device)
        made += [(each.dense, ours), (each.words[: part.words], theirs), (each.totals, counts)]

    def encode() -> None:
        for number, (pool, plan, each) in enumerate(zip(pools, plans, buffers, strict=True)):
            each.words.zero_()
            each.totals.zero_()
            gpu_launch.launch_exact_encode(pool, table, plan, [stage[number] for stage in dense], each)

    def decode() -> None:
        for pool, plan, ours, stream in zip(targets, plans, fixed, words, strict=True):
            gpu_launch.launch_exact_decode(pool, table, plan, ours, stream.view(torch.int32))

    raw, sizes = sum(plan.raw_bytes for plan in plans), [stage.size for stage in coded.host]
    left = sum(part.escapes * part.plan.format.item_bytes for part in layout.parts)
    pages = [(pool.flatten(), tensor) for pool, tensor in zip(targets, coded.pages[EXACT].tensors(), strict=True)]
    return [
        Step("encode the third", encode, raw + sum(sizes), made),
        Step("restore", decode, sizes[EXACT] + 2 * raw, pages, left),
    ]


def _fixed(layout: lynx.Layout, payload: torch.Tensor) -> list[torch.Tensor]:
    """The fixed sections of keys and of values."""
    return [payload[start:][: part.fixed_bytes] for part, start in zip(layout.parts, layout.offsets, strict=True)]


def _pairs(found: Block, wanted: Block) -> Pairs:
    return list(zip(found.tensors(), wanted.tensors(), strict=True))


def _check_against_cpu(codec: Codec, block: Block) -> None:
    """Raises GateError where the GPU makes other payloads of a few pages than the CPU, or decodes them otherwise."""
    here, there = (
        Coded(codec, Block(*(tensor[:, :SMALL_PAGES].to(device).contiguous() for tensor in block.tensors())))
        for device in (block.keys.device, torch.device("cpu"))
    )
    pairs = list(zip((torch.from_numpy(stage) for stage in here.host), there.device, strict=True))
    for ours, theirs in zip(here.pages, there.pages, strict=True):
        pairs += [(found.cpu(), wanted) for found, wanted in _pairs(ours, theirs)]
    _require_equal(f"{codec.name}, GPU and CPU", pairs)


def _require_equal(what: str, pairs: Pairs, left: int = 0) -> None:
    """Raises GateError where more than `left` bytes differ in all."""
    wrong = 0
    for found, wanted in pairs:
        ours, theirs = (tensor.flatten().view(torch.uint8) for tensor in (found, wanted))
        if ours.numel() != theirs.numel():
            raise GateError(f"{what}: {ours.numel()} and {theirs.numel()} bytes; nothing was timed")
        wrong += int((ours != theirs).sum())
    if wrong > left:
        raise GateError(f"{what}: {wrong} bytes differ; nothing was timed")
