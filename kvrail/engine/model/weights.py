"""Weight files as the loader sees them: plain safetensors files, or files that a service's reader understands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

Progress = Callable[[int, int], None]
"""Called with the bytes of weights that are loaded, and all."""


class WeightFile(Protocol):
    """The bytes of a safetensors file, on a disk or in memory."""

    name: str
    size: int

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on, which the file has."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A checkpoint in host memory: its tensors by name, and their files in order of name."""

    tensors: Mapping[str, torch.Tensor]
    files: Sequence[WeightFile]


class WeightReader(Protocol):
    """Reads weights that are stored in another form than safetensors; a service gives it to the loader."""

    pattern: str  # matches the names of its files

    def load(self, folder: Path, progress: Progress) -> LoadedWeights:
        """The weights of a folder that has such files. Raises ConfigError where they cannot be read."""
        ...


class PlainFile:
    """A safetensors file on a disk."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.size = path.stat().st_size
        self._path = path

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset` on."""
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def plain_files(folder: Path) -> list[WeightFile]:
    """The safetensors files of a folder, in order of name."""
    return [PlainFile(path) for path in sorted(folder.glob("*.safetensors"))]
