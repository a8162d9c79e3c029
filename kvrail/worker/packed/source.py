"""A safetensors file, mapped: its header and the bytes of its tensors, where they lie."""

import mmap
from pathlib import Path

import numpy as np

from kvrail.engine.model.header import Header, Tensor, open_file, read_header
from kvrail.errors import ConfigError
from kvrail.worker.packed.file import Bytes

WEIGHTS = "*.safetensors"


class SourceFile:
    """A safetensors file, open for reading as long as anything refers to it.

    Raises ConfigError where it is not one, or is truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header = read_header(path)
        with open_file(path) as file:
            self._data: Bytes = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def bytes_of(self, tensor: Tensor) -> Bytes:
        """The bytes of one of its tensors, read-only."""
        return self._data[tensor.begin : tensor.end]


class BaseFolder:
    """A model's folder that deltas are made against: its tensors by name. Raises ConfigError where it has none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = [SourceFile(path) for path in sorted(folder.glob(WEIGHTS))]
        if not files:
            raise ConfigError(f"--base {folder} has no safetensors files; name the folder of a plain model")
        self._tensors = {tensor.name: (file, tensor) for file in files for tensor in file.header.tensors}

    def like(self, tensor: Tensor) -> Bytes | None:
        """The bytes of the tensor of the same name, type and size, or None where there is none."""
        file, found = self._tensors.get(tensor.name, (None, None))
        if file is None or found is None or found.dtype != tensor.dtype:
            return None
        return file.bytes_of(found) if found.end - found.begin == tensor.end - tensor.begin else None
