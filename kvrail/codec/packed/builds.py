"""Builds of kernels.cu by NVRTC, which comes with torch for CUDA: no compiler is needed on the machine."""

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("kernels.cu")
_LEAST_CAPABILITY = (9, 0)
"""The copy engine's tensors and barriers that count bytes came with Hopper."""
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Build:
    """Constants of a build of `product`; see kernels.cu."""

    token_tiles: int
    producers: int
    strips: int
    stages: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.producers + self.strips + 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: stages of weights and of tokens, and a stage's two barriers."""
        tiles = self.producers // self.strips
        return self.stages * (2048 * self.producers + 1024 * self.token_tiles * tiles + 16)


def unsupported(device: torch.device) -> str:
    """Why a device cannot run the kernels; empty where it can."""
    if device.type != "cuda":
        return f"packed weights need an NVIDIA GPU, not device {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"packed weights need compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has {found}"
    return ""


def product_kernel(device: torch.device, build: Build) -> Any:
    """The driver's function of a build, ready to be launched."""
    names = {
        "TOKEN_TILES": build.token_tiles,
        "PRODUCERS": build.producers,
        "STRIPS": build.strips,
        "STAGES": build.stages,
    }
    return _kernel(device, "product", tuple(names.items()), build.shared_bytes)


def unpack_kernel(device: torch.device) -> Any:
    """The driver's function of `unpack`."""
    return _kernel(device, "unpack", (("TOKEN_TILES", 1), ("PRODUCERS", 1)), 0)


def _kernel(device: torch.device, name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    with _compiling:
        return _loaded(index, name, constants, shared_bytes)


@cache
def _loaded(index: int, name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int) -> Any:
    from cuda.bindings import driver

    torch.cuda.synchronize(index)  # the context exists, and is the thread's
    with torch.cuda.device(index):
        library = done(driver.cuLibraryLoadData(_compiled(index, constants), [], [], 0, [], [], 0))
        function = done(driver.cuKernelGetFunction(done(driver.cuLibraryGetKernel(library, name.encode()))))
        if shared_bytes:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return function


@cache
def _compiled(index: int, constants: tuple[tuple[str, int], ...]) -> bytes:
    from cuda.bindings import nvrtc

    major, minor = torch.cuda.get_device_capability(index)
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
    options += [f"--define-macro={name}={value}".encode() for name, value in constants]
    source = _SOURCE.read_bytes()
    program = done(nvrtc.nvrtcCreateProgram(source, _SOURCE.name.encode(), 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(done(nvrtc.nvrtcGetProgramLogSize(program)))
        done(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{_SOURCE.name} does not compile for sm_{major}{minor}: {log.decode(errors='replace')}")
    code = bytes(done(nvrtc.nvrtcGetCUBINSize(program)))
    done(nvrtc.nvrtcGetCUBIN(program, code))
    done(nvrtc.nvrtcDestroyProgram(program))
    return code


def done(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's bindings returned. Raises RuntimeError where it failed."""
    error, *values = answer
    if int(error):
        raise RuntimeError(f"CUDA answered {error.name} ({int(error)})")
    return values[0] if values else None
