"""SplitZip's kernels alone: pages to a payload in device memory and back, without the way over the bus to the host."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.codec_data import Windows
from benchmarks.codec_trials import Trial, poisoned
from kvrail.codec.base import Block, PagedBlock
from kvrail.codec.splitzip.one_stage.codebook import default_codebook
from kvrail.codec.splitzip.one_stage.codec import WindowCodec
from kvrail.codec.splitzip.tiles.format import WindowCode
from kvrail.codec.splitzip.tiles.payload import parse, scale_bytes_of
from kvrail.codec.splitzip.tiles.plan import plans_of

GRAPH_BYTES = 8 << 20
"""Blocks up to this size are also timed as captured graphs: their launches take longer than their work."""


def kernels(block: Block) -> Iterator[Trial]:
    """`splitzip` with the codebook that ships and `splitzip-channel`; small blocks also as CUDA graphs."""
    for name, code in (("splitzip", WindowCode(4, False)), ("splitzip-channel", WindowCode(3, True))):
        trial = kernel_trial(f"{name}, kernels", block, code, None if code.per_channel else default_codebook())
        yield trial
        if block.spec.raw_bytes <= GRAPH_BYTES:
            yield captured(trial)


def kernel_trial(name: str, block: Block, code: WindowCode, windows: Windows | None) -> Trial:
    """Launches into memory that is there already. windows: in a codebook's place, None where channels have their own.

    What is decoded is the payload that the same launches give the codec, so that the gate covers both.
    """
    from kvrail.codec.splitzip.one_stage.gpu_launch import launch_decode, launch_encode
    from kvrail.codec.splitzip.tiles import gpu_launch

    out, spec = poisoned(block), block.spec
    source, target = PagedBlock.whole(block), PagedBlock.whole(out)
    kinds = ("keys", "values")
    tops = tuple(None if windows is None else windows.tops(spec.dtype, kind, source.layers) for kind in kinds)
    plans = plans_of(spec, code)
    table = gpu_launch.make_table(source, tops)
    buffers = gpu_launch.EncodeBuffers.allocate(plans, scale_bytes_of(spec), source.device)
    codec = WindowCodec(name, {spec.dtype: code}, windows)
    encoding = codec.encode(source)
    host = torch.frombuffer(bytearray(encoding.stages()[0]), dtype=torch.uint8)
    layout, stats = parse(host.numpy(), spec, plans_of(spec, code)), encoding.stats()
    payload = host.to(source.device)
    return Trial(
        name,
        block,
        out,
        encode=lambda: launch_encode(source, plans, table, buffers),
        decode=lambda _: launch_decode(payload, layout, table, target),
        size=lambda _: layout.size,
        escapes=lambda: stats.escapes / stats.values,
    )


def captured(trial: Trial) -> Trial:
    """The same launches as two CUDA graphs."""

    def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        call()  # compiled before it is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    encode, decode = capture(trial.encode), capture(lambda: trial.decode(None))
    name = trial.name.replace("kernels", "graph")
    return Trial(
        name, trial.block, trial.out, encode.replay, lambda _: decode.replay(), trial.size, escapes=trial.escapes
    )
