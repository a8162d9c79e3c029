"""Builds of a form's kernels by NVRTC, which comes with torch for CUDA: no compiler is needed on the machine."""

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent
_LEAST_CAPABILITY = (9, 0)
"""The copy engine's tensors and barriers that count bytes came with Hopper."""
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights: what product.cuh needs to know of it.

    name: its folder in kvrail/codec, whose gpu_kernels.cu has its tiles and its `unpack`. types: ctypes of its
    PARAMETERS. scratch: bytes of shared memory that each producing warp needs. unpack_shared: those of a block of
    `unpack`.
    """

    name: str
    types: tuple[Any, ...]
    scratch: int = 0
    unpack_shared: int = 0


@dataclass(frozen=True, slots=True)
class Build:
    """Constants of a build of `product`; see product.cuh."""

    token_tiles: int
    producers: int
    strips: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.producers + self.strips + 1)

    def shared_bytes(self, scratch: int) -> int:
        """Shared memory of a block: stages of weights and tokens, a stage's two barriers, each producer's scratch."""
        tiles = self.producers // self.strips
        stage = 2048 * self.producers + 1024 * self.token_tiles * tiles + 16
        return self.stages * stage + self.producers * scratch


def unsupported(device: torch.device, name: str) -> str:
    """Why a device cannot run the kernels of the form called `name`; empty where it can."""
    if device.type != "cuda":
        return f"{name} weights need an NVIDIA GPU, not device {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"{name} weights need compute capability 9.0 (Hopper), {torch.cuda.get_device_name(device)} has {found}"
    return ""


def source_of(name: str, *, product: bool) -> str:
    """The source of a form's kernels: of `product`, or of `unpack`."""
    parts = [_HERE / "ptx.cuh", _HERE.parent / name / "gpu_kernels.cu"]
    if product:
        parts.append(_HERE / "product.cuh")
    return "".join(f'#line 1 "{part.name}"\n{part.read_text()}' for part in parts)


def product_kernel(device: torch.device, form: Form, build: Build) -> Any:
    """The driver's function of a build, ready to be launched."""
    names = {
        "TOKEN_TILES": build.token_tiles,
        "PRODUCERS": build.producers,
        "STRIPS": build.strips,
        "STAGES": build.stages,
    }
    return _kernel(device, form.name, "product", tuple(names.items()), build.shared_bytes(form.scratch))


def unpack_kernel(device: torch.device, form: Form) -> Any:
    """The driver's function of `unpack`."""
    return _kernel(device, form.name, "unpack", (), form.unpack_shared)


def _kernel(device: torch.device, form: str, name: str, constants: tuple[tuple[str, int], ...], shared: int) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    with _compiling:
        return _loaded(index, form, name, constants, shared)


@cache
def _loaded(index: int, form: str, name: str, constants: tuple[tuple[str, int], ...], shared_bytes: int) -> Any:
    from cuda.bindings import driver

    torch.cuda.synchronize(index)  # the context exists, and is the thread's
    with torch.cuda.device(index):
        code = _compiled(torch.cuda.get_device_capability(index), form, constants)
        library = done(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        function = done(driver.cuKernelGetFunction(done(driver.cuLibraryGetKernel(library, name.encode()))))
        if shared_bytes:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            done(driver.cuFuncSetAttribute(function, most, shared_bytes))
    return function


@cache
def _compiled(capability: tuple[int, int], form: str, constants: tuple[tuple[str, int], ...]) -> bytes:
    from cuda.bindings import nvrtc

    architecture = "sm_{}{}".format(*capability)
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    options += [f"--define-macro={name}={value}".encode() for name, value in constants]
    source = source_of(form, product=bool(constants)).encode()
    program = done(nvrtc.nvrtcCreateProgram(source, f"{form}.cu".encode(), 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(done(nvrtc.nvrtcGetProgramLogSize(program)))
        done(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"kernels of {form} do not compile for {architecture}: {log.decode(errors='replace')}")
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
