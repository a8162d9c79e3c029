"""Kernels of weights in fewer bytes on a CPU: their own source, compiled by g++ with emulator.h instead of ptx.cuh."""

import ctypes
import subprocess
from pathlib import Path

import torch

from kvrail.codec import fused
from kvrail.codec.fused.builds import Build, Form

_HERE, _CODECS = Path(__file__).parent, Path(fused.__file__).parents[1]
_PRODUCT = """
extern "C" void run(PARAMETERS, const u16* x, const u16* bias, u16* out, int rows, int columns, int tokens, int grid,
                    int room_bytes) {
  const TensorMap map{x, columns, tokens, TOKENS};
  launch(grid, (PRODUCERS + STRIPS + 1) * 32, room_bytes,
         [=] { product(PARTS, map, bias, out, rows, columns, tokens); });
}
"""
_UNPACK = """
extern "C" void run(PARAMETERS, u16* out, int rows, int columns, int grid, int room_bytes) {
  launch(grid, 256, room_bytes, [=] { unpack(PARTS, out, rows, columns); });
}
"""
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class Emulated:
    """`product` of a build, or `unpack` where there is none, of a form's kernels."""

    def __init__(self, folder: Path, form: Form, build: Build | None) -> None:
        self.form, self.build = form, build
        sources = [_HERE / "emulator.h", _CODECS / form.name / "gpu_kernels.cu"]
        defines = []
        if build is not None:
            sources.append(_CODECS / "fused" / "product.cuh")
            defines += [f"-DTOKEN_TILES={build.token_tiles}", f"-DPRODUCERS={build.producers}"]
            defines += [f"-DSTRIPS={build.strips}", f"-DSTAGES={build.stages}"]
        path = folder / f"{form.name}-{build}.cpp".replace(" ", "").replace("/", "-")
        path.write_text("".join(f'#include "{source}"\n' for source in sources) + (_PRODUCT if build else _UNPACK))
        library = path.with_suffix(".so")
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *defines, str(path), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))

    def product(
        self, parts: list[torch.Tensor | int], x: torch.Tensor, bias: torch.Tensor | None, rows: int, blocks: int
    ) -> torch.Tensor:
        """What `launch` has the kernel do, with so many blocks."""
        assert self.build is not None
        tokens, columns = x.shape
        out = torch.full((tokens, rows), float("nan"), dtype=torch.bfloat16)
        shared = self.build.shared_bytes(self.form.scratch)
        given = [x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()]
        self._run(parts, [_POINTER] * 3 + [_INT] * 5, [*given, rows, columns, tokens, blocks, shared])
        return out

    def unpack(self, parts: list[torch.Tensor | int], rows: int, columns: int, blocks: int) -> torch.Tensor:
        """The same."""
        out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
        self._run(parts, [_POINTER] + [_INT] * 4, [out.data_ptr(), rows, columns, blocks, self.form.unpack_shared])
        return out

    def readable_everywhere(self) -> None:
        """Let the next launch read at any address, for callers that have no tensors but their addresses."""
        self._library.allow(None, ctypes.c_uint64(1 << 63))

    def _run(self, parts: list[torch.Tensor | int], types: list, others: list) -> None:
        given = []
        for part in parts:
            if isinstance(part, torch.Tensor):
                self._library.allow(_POINTER(part.data_ptr()), ctypes.c_uint64(part.nbytes))
                part = part.data_ptr()
            given.append(part)
        kinds = [*self.form.types, *types]
        self._library.run(*(kind(value) for kind, value in zip(kinds, [*given, *others], strict=True)))
        self._library.forget()
