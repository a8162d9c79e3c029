"""The emulator itself: small kernels give numpy's results, and what is wrong with others is found."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvrail.engine.attention.triton.pair_kernel import widened
from tests.ptx.compiled import emulated, in_a_child
from tests.ptx.instructions import Fault
from tests.ptx.memory import Race

pytestmark = pytest.mark.heavy


@triton.jit
def compute_kernel(first, second, integers, floats):
    """int32 and float32, each [results, 1024]; the floats are those of the integers."""
    at = tl.arange(0, 1024)
    a, b = tl.load(first + at), tl.load(second + at)
    tl.store(integers + at, a * b + 7)
    tl.store(integers + 1024 + at, tl.minimum(a, b) ^ tl.maximum(a, b) - ~a)
    tl.store(integers + 2048 + at, (a >> (b & 31)) | (a.to(tl.uint32) >> 5).to(tl.int32, bitcast=True) << 3)
    tl.store(integers + 3072 + at, (a.to(tl.int64) * b >> 32).to(tl.int32))
    tl.store(integers + 4096 + at, tl.where(a.to(tl.int16) < b.to(tl.int8).to(tl.int16), a, -b))
    x, y = a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)
    tl.store(floats + at, x + y)
    tl.store(floats + 1024 + at, x * y)
    tl.store(floats + 2048 + at, tl.div_rn(x, y))
    tl.store(floats + 3072 + at, tl.where(tl.abs(x) <= y, x - y, tl.maximum(x, y)))


@triton.jit
def reduce_kernel(given, out):
    """int32 [16, 128]: sums, minima and maxima of rows, then of columns; cumulative sums of the first row."""
    row, column = tl.arange(0, 16), tl.arange(0, 128)
    values = tl.load(given + row[:, None] * 128 + column[None, :])
    tl.store(out + row, tl.sum(values, 1))
    tl.store(out + 16 + row, tl.min(values, 1))
    tl.store(out + 32 + row, tl.max(values, 1))
    tl.store(out + 48 + column, tl.sum(values, 0))
    tl.store(out + 176 + column, tl.cumsum(tl.load(given + column), 0))


@triton.jit
def transpose_kernel(given, out, KIND: tl.constexpr):
    """[64, 64] of KIND; a row's elements lie together in both."""
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, tl.trans(tl.load(given + at).to(KIND)))


@triton.jit
def bytes_kernel(first, second, out):
    """int32 [128]: bytes chosen, one of them a sign; and a product and a sum in bfloat16, of two each."""
    at = tl.arange(0, 128)
    a, b = tl.load(first + at), tl.load(second + at)
    chosen = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7A14;", "=r,r,r", [a, b], tl.int32, True, 1)
    tl.store(out + at, chosen)
    fused = tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $1;", "=r,r,r", [a, b], tl.int32, True, 1)
    tl.store(out + 128 + at, fused)


@triton.jit
def widen_kernel(given, out):
    """int16 [256], pairs of two types of eight bits; their even and their odd ones in bfloat16, [2, 2, 256]."""
    at = tl.arange(0, 256)
    pairs = tl.load(given + at)
    tl.store(out + at, widened(pairs, tl.float8e4nv, False))
    tl.store(out + 256 + at, widened(pairs, tl.float8e4nv, True))
    tl.store(out + 512 + at, widened(pairs, tl.float8e5, False))
    tl.store(out + 768 + at, widened(pairs, tl.float8e5, True))


@triton.jit
def branch_kernel(out, DIVISOR: tl.constexpr):
    """int32 [128]: 1 of threads whose number / DIVISOR is even, else 2."""
    at = tl.arange(0, 128)
    code: tl.constexpr = """{ .reg .pred p; mov.b32 $0, 1; setp.eq.s32 p, $1, 0; @p bra skip_${:uid};
        mov.b32 $0, 2;
        skip_${:uid}:
        }"""
    tl.store(out + at, tl.inline_asm_elementwise(code, "=&r,r", [at // DIVISOR % 2], tl.int32, False, 1))


@triton.jit
def exchange_kernel(given, out, BARRIER: tl.constexpr):
    """int32 [128], reversed by way of memory that all threads share."""
    at = tl.arange(0, 128)
    tl.store(out + at, tl.load(given + at))
    if BARRIER:
        tl.debug_barrier()
    found = tl.load(out + 127 - at)
    tl.debug_barrier()
    tl.store(out + at, found)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """int32, all bits of which are random."""
    numbers = np.random.default_rng(seed).integers(-(2**31), 2**31, shape)
    return torch.from_numpy(numbers.astype(np.int32))


def compute() -> None:
    first, second = random(1024), random(1024, seed=1)
    first[:8], second[:8] = torch.tensor([0, -(2**31), 1, -1] * 2), torch.tensor([0] * 4 + [-(2**31)] * 4)
    integers, floats = torch.zeros(5, 1024, dtype=torch.int32), torch.zeros(4, 1024)
    compute_kernel[(1,)](first, second, integers, floats)
    a, b = first.numpy(), second.numpy()
    with np.errstate(all="ignore"):
        wanted = [
            a * b + 7,
            np.minimum(a, b) ^ np.maximum(a, b) - ~a,
            a >> (b & 31) | (a.view(np.uint32) >> 5).view(np.int32) << 3,
            (a.astype(np.int64) * b >> 32).astype(np.int32),
            np.where(a.astype(np.int16) < b.astype(np.int8), a, -b),
        ]
        assert np.array_equal(integers.numpy(), np.stack(wanted))
        x, y = a.view(np.float32), b.view(np.float32)
        larger = np.where(np.abs(x) <= y, x - y, np.fmax(x, y))
        assert np.array_equal(floats.numpy(), np.stack([x + y, x * y, x / y, larger]), equal_nan=True)


def widen() -> None:
    every, out = torch.arange(256, dtype=torch.uint8), torch.zeros(2, 2, 256, dtype=torch.bfloat16)
    pairs = torch.stack([every, every.flip(0)], 1)
    widen_kernel[(1,)](pairs.view(torch.int16)[:, 0], out)
    for found, dtype, bias in zip(out, (torch.float8_e4m3fn, torch.float8_e5m2), (120, 112), strict=True):
        wanted = (pairs.T.contiguous().view(dtype).double() * 2.0**-bias).bfloat16()
        kept = wanted.isfinite()
        assert torch.equal(found.view(torch.int16)[kept], wanted.view(torch.int16)[kept]) and found.isfinite().all()


def branch() -> None:
    out = torch.zeros(128, dtype=torch.int32)
    branch_kernel[(1,)](out, 32)
    assert out.tolist() == ([1] * 32 + [2] * 32) * 2
    with pytest.raises(Fault, match="some threads branch"):
        branch_kernel[(1,)](out, 16)


def reduce() -> None:
    given, out = random(16, 128), torch.zeros(304, dtype=torch.int32)
    reduce_kernel[(1,)](given, out)
    values = given.numpy()
    parts = [values.sum(1, dtype=np.int32), values.min(1), values.max(1), values.sum(0, dtype=np.int32)]
    assert np.array_equal(out.numpy(), np.concatenate([*parts, np.cumsum(values[0], dtype=np.int32)]))


def transpose() -> None:
    for kind, name in ((torch.int32, tl.int32), (torch.int16, tl.int16), (torch.int8, tl.int8)):
        given, out = random(64, 64).to(kind), torch.zeros(64, 64, dtype=kind)
        transpose_kernel[(1,)](given, out, name)
        assert torch.equal(out, given.T)


def choose_bytes() -> None:
    """float32 holds products of two bfloat16; what is added is as large as a factor, so that float64 holds the sum."""
    first, second, out = random(128), random(128, seed=1), torch.zeros(256, dtype=torch.int32)
    first, second = first & ~0x40004000 | 0x30003000, second & ~0x40004000 | 0x30003000
    bytes_kernel[(1,)](first, second, out)
    both = np.stack([first.numpy(), second.numpy()], 1).view(np.uint8)
    sign = np.where(both[:, 2] >= 128, 255, 0)
    wanted = np.stack([both[:, 4], both[:, 1], sign, both[:, 7]], 1).astype(np.uint8).view(np.int32)[:, 0]
    assert np.array_equal(out[:128].numpy(), wanted)
    a, b, found = (each.view(torch.bfloat16) for each in (first, second, out[128:]))
    assert torch.equal(found, (a.double() * b.double() + a.double()).bfloat16())


def exchange(barrier: bool) -> None:
    given, out = random(128), torch.zeros(128, dtype=torch.int32)
    exchange_kernel[(1,)](given, out, barrier)
    assert torch.equal(out, given.flip(0))


def without_barriers(ptx: str) -> str:
    return re.sub(r"bar\.sync\s+0;", "", ptx)


def right(case: str) -> None:
    with emulated():
        globals()[case]()


def barriers_needed() -> None:
    for case in (reduce, transpose):
        with emulated(without_barriers), pytest.raises(Race, match="shared"):
            case()
    with emulated():
        exchange(True)
        with pytest.raises(Race, match=r"ld\.global"):
            exchange(False)


def faults() -> None:
    odd = ".reg .pred %odd; and.b32 %r1, %tid.x, 1; setp.eq.b32 %odd, %r1, 1; @%odd ret;"
    edits = {
        "unknown instruction: xyz.s64": lambda ptx: ptx.replace("add.s64", "xyz.s64"),
        "some threads branch": lambda ptx: re.sub(r"bar\.sync\s+0;", odd, ptx),
        r"%r\d+ is read before it is written": lambda ptx: re.sub(r"mov\.u32\s+%r\d+, %tid\.x;", "", ptx),
        "misaligned": lambda ptx: ptx.replace(" 508;", " 510;"),
        "outside of": lambda ptx: ptx,
    }
    for message, edit in edits.items():
        out = torch.zeros(128, dtype=torch.int32)
        with emulated(edit), pytest.raises(Fault, match=message):
            exchange_kernel[(1,)](random(127 if message == "outside of" else 128), out, True)


@pytest.mark.parametrize("case", ["compute", "reduce", "transpose", "choose_bytes", "widen", "branch"])
def test_numpys_results(case: str, cache: Path) -> None:
    in_a_child(right, case, cache=cache)


def test_a_missing_barrier_is_found(cache: Path) -> None:
    in_a_child(barriers_needed, cache=cache)


def test_what_is_wrong_is_named(cache: Path) -> None:
    in_a_child(faults, cache=cache)
