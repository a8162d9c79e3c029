"""How a worker loads a packed model: each file is decoded into memory as it was, and tensors are views of it."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kvrail.engine.model.header import CODED_AS, Tensor, shown
from kvrail.engine.model.weights import LoadedWeights, Progress, WeightFile
from kvrail.errors import ConfigError
from kvrail.worker.packed.file import SUFFIX, PackedFile
from kvrail.worker.packed.source import WEIGHTS

logger = logging.getLogger("kvrail.packed")


class Image:
    """A safetensors file in memory. memory: uint8 [bytes of the file]."""

    def __init__(self, name: str, memory: torch.Tensor) -> None:
        self.name = name
        self.size = memory.numel()
        self._memory = memory

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on."""
        return self._memory[offset : offset + size].numpy().tobytes()

    def tensor(self, tensor: Tensor) -> torch.Tensor:
        """A tensor of the file, of a type that torch has: a view where it is aligned, else a copy."""
        dtype: torch.dtype = getattr(torch, CODED_AS[tensor.dtype])
        raw = self._memory[tensor.begin : tensor.end]
        aligned = raw if tensor.begin % dtype.itemsize == 0 else raw.clone()
        shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype == "F4" else tensor.shape
        return aligned.view(dtype).reshape(shape)


def _check_types(packed: PackedFile) -> None:
    """Raise ConfigError for a tensor that torch cannot hold."""
    for tensor in packed.header.tensors:
        where = f"tensor {shown(tensor.name)} of {packed.path}"
        if tensor.dtype not in CODED_AS:
            raise ConfigError(
                f"{where} has type {shown(tensor.dtype)}, which torch does not have; convert it to another"
            )
        if tensor.dtype == "F4" and tensor.shape[-1] % 2:
            raise ConfigError(
                f"{where} has rows of {tensor.shape[-1]} values of F4, which lie two in a byte; convert it to another"
            )


class PackedWeights:
    """Reads packed models for the loader (kvrail.engine.model.weights.WeightReader)."""

    pattern = WEIGHTS + SUFFIX

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> LoadedWeights:
        """Decode all packed files of a folder, each tensor on all threads. progress: of the bytes on disk.

        Raises ConfigError that names file and tensor where something is damaged, and for deltas.
        """
        begun, stored = time.monotonic(), 0
        paths = sorted(folder.glob(self.pattern))
        total = sum(path.stat().st_size for path in paths if path.exists())
        files: list[WeightFile] = []
        tensors: dict[str, torch.Tensor] = {}
        for path in paths:
            image, found = _decoded(path, partial(_tell, progress, stored, total))
            files.append(image)
            if twice := next(iter(found.keys() & tensors.keys()), None):
                raise ConfigError(f"tensor {shown(twice)} of {path} is in another file of its folder too; delete one")
            tensors.update(found)
            stored += path.stat().st_size
        plain = sum(file.size for file in files)
        logger.info(
            "unpacked %.1f MB of weights from %.1f MB on disk, %.1f %% less, in %.2f s",
            plain / 1e6,
            stored / 1e6,
            100 * (1 - stored / plain),
            time.monotonic() - begun,
        )
        return LoadedWeights(tensors, files)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    """Report that `done` bytes of a file are decoded, behind `before` bytes of others."""
    progress(before + done, total)


def _decoded(path: Path, progress: Callable[[int], None]) -> tuple[Image, dict[str, torch.Tensor]]:
    with PackedFile(path) as packed:
        if packed.base is not None:
            raise ConfigError(
                f"{path} has differences from {shown(packed.base.folder)}, no whole model; kvrail unpack it with --base"
                " first"
            )
        _check_types(packed)
        whole = packed.memory(packed.header.file_bytes)
        whole[: len(packed.header.raw)] = memoryview(packed.header.raw)
        for place, tensor in enumerate(packed.header.tensors):
            packed.decode(place, whole[tensor.begin : tensor.end])
            progress(packed.parts[place].offset + packed.parts[place].size)
        image = Image(packed.name, torch.from_numpy(whole))
        return image, {tensor.name: image.tensor(tensor) for tensor in packed.header.tensors}
