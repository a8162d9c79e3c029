"""GPU compressors beside ours, on the same tensors: nvCOMP and cuZipNN, through their Python packages."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.codec_trials import Trial, poisoned
from kvrail.codec.base import Block

KIB = 1024


def peers(block: Block) -> Iterator[Trial]:
    """A trial of each peer that is installed; of the others, a printed line."""
    if _found("nvidia.nvcomp"):
        for name, options in _nvcomp_options():
            yield _nvcomp(name, options, block)
    else:
        print("nvCOMP: not installed, left out (pip install nvidia-nvcomp-cu13)")
    if _found("cuzipnn"):
        yield _cuzipnn(block)
    else:
        print("cuZipNN: not installed, left out (pip install cuzipnn, which needs nvidia-nvcomp-cu13<6)")
    print("DietGPU: has no package to install, left out")


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nvcomp_options() -> Iterator[tuple[str, dict[str, Any]]]:
    for algorithm, data_type in (("LZ4", "|u1"), ("Cascaded", "<u2"), ("Bitcomp", "<u2")):
        yield f"nvCOMP {algorithm}", {"algorithm": algorithm, "data_type": data_type}
    for kib in (64, 256):
        options = {"algorithm": "ANS", "data_type": "<f2", "uncomp_chunk_size": kib * KIB}
        yield f"nvCOMP ANS, 16-bit float, {kib} KiB", options


def _nvcomp(name: str, options: dict[str, Any], block: Block) -> Trial:
    from nvidia import nvcomp

    codec = nvcomp.Codec(cuda_stream=torch.cuda.current_stream().cuda_stream, **options)
    flat = [tensor.view(torch.uint8).flatten() for tensor in block.tensors()]
    arrays = [nvcomp.as_array(tensor) for tensor in flat]
    return _trial(
        name,
        block,
        encode=lambda: [codec.encode(array) for array in arrays],
        decode=lambda payload: [codec.decode(coded) for coded in payload],
        size=lambda payload: sum(coded.buffer_size for coded in payload),
        as_tensor=lambda decoded: torch.as_tensor(decoded, device="cuda"),
    )


def _cuzipnn(block: Block) -> Trial:
    from cuzipnn import compress_tensor, decompress_tensor

    return _trial(
        "cuZipNN, to and from the host",
        block,
        encode=lambda: [compress_tensor(tensor) for tensor in block.tensors()],
        decode=lambda payload: [decompress_tensor(coded, device="cuda") for coded in payload],
        size=lambda payload: sum(coded.numel() for coded in payload),
        as_tensor=lambda decoded: decoded,
    )


def _trial(
    name: str,
    block: Block,
    encode: Callable[[], list[Any]],
    decode: Callable[[list[Any]], list[Any]],
    size: Callable[[list[Any]], int],
    as_tensor: Callable[[Any], torch.Tensor],
) -> Trial:
    """A trial of a peer that decodes into memory of its own; the copy from there is not timed."""
    out, last = poisoned(block), []

    def collect() -> None:
        for tensor, decoded in zip(out.tensors(), last, strict=True):
            tensor.view(torch.uint8).flatten().copy_(as_tensor(decoded).view(torch.uint8).flatten())

    def keep(payload: list[Any]) -> None:
        last[:] = decode(payload)

    return Trial(name, block, out, encode, keep, size, collect=collect)
