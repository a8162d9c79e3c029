"""PTX's instructions that compute: each is a function of its operands, looked up by its name.

Registers are uint64 [threads] whatever their width, predicates too; the bits above a register's width are 0.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Values = npt.NDArray[np.uint64]
Compute = Callable[..., npt.NDArray[Any]]


class Fault(Exception):
    """What no GPU would do, or not the same each time; or an instruction that is not known here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`@!guard name.flags.kind operands`; text: as it was read."""

    guard: str
    negated: bool
    name: str
    flags: tuple[str, ...]
    kind: str
    operands: tuple[str, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> "Instruction":
        found = re.match(r"^(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", text)
        if not found:
            raise Fault(f"not an instruction: {text}")
        negated, guard, code, rest = found.groups()
        name, *parts = code.split(".")
        kind = parts.pop() if parts and re.fullmatch(r"(pred|[bsuf]\d+|bf16)(x2)?", parts[-1]) else ""
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        return cls(guard or "", bool(negated), name, tuple(parts), kind, tuple(operands), text)

    @property
    def bits(self) -> int:
        """Of a value."""
        return 1 if self.kind == "pred" else int(self.kind.removesuffix("x2").lstrip("bsuf"))

    def unknown(self) -> Fault:
        return Fault(f"unknown instruction: {self.text}")


def unsigned(values: Values, bits: int) -> Values:
    """The lowest bits."""
    return values & np.uint64(2**bits - 1)


def signed(values: Values, bits: int) -> npt.NDArray[np.int64]:
    """The lowest bits as a signed number."""
    return (values << np.uint64(64 - bits)).view(np.int64) >> np.int64(64 - bits)


def numbers(it: Instruction, values: Values) -> npt.NDArray[Any]:
    """The numbers that an instruction takes `values` for; float64 for bfloat16."""
    if it.kind == "f64":
        return values.view(np.float64)
    if it.kind == "f32":
        return values.astype(np.uint32).view(np.float32)
    if it.kind == "bf16":
        return (values << np.uint64(16)).astype(np.uint32).view(np.float32).astype(np.float64)
    return signed(values, it.bits) if it.kind.startswith("s") else unsigned(values, it.bits)


def bits_of(it: Instruction, found: npt.NDArray[Any]) -> Values:
    """The reverse; float64 is rounded to bfloat16, ties to even."""
    if it.kind == "f64":
        return found.astype(np.float64).view(np.uint64)
    if it.kind == "f32":
        return found.astype(np.float32).view(np.uint32).astype(np.uint64)
    if it.kind == "bf16":
        unit = np.ldexp(1.0, np.maximum(np.frexp(found)[1] - 1, -126) - 7)
        rounded = (np.rint(found / unit) * unit).astype(np.float32).view(np.uint32).astype(np.uint64)
        return np.where(np.isnan(found), np.uint64(0x7FFF), rounded >> np.uint64(16))
    return found.astype(np.uint64)


COMPUTED: dict[str, tuple[Compute, frozenset[str]]] = {}
"""Name: a function (instruction, *operands) of registers, and the flags that it knows."""


def computes(names: str, flags: str = "") -> Callable[[Compute], Compute]:
    """Have a function compute these instructions."""

    def put(function: Compute) -> Compute:
        COMPUTED.update({name: (function, frozenset(flags.split())) for name in names.split()})
        return function

    return put


def check(it: Instruction) -> None:
    """Raises Fault where it is not known; its kind is looked at when it runs."""
    if not it.kind or not COMPUTED[it.name][1].issuperset(it.flags):
        raise it.unknown()


def compute(it: Instruction, inputs: list[Values]) -> Values:
    """What the first operand becomes."""
    function = COMPUTED[it.name][0]
    with np.errstate(all="ignore"):
        if not it.kind.endswith("x2"):
            return function(it, *inputs).astype(np.uint64)
        half = Instruction(it.guard, it.negated, it.name, it.flags, it.kind[:-2], it.operands, it.text)
        low, high = (
            unsigned(function(half, *(unsigned(each >> np.uint64(shift), 16) for each in inputs)).astype(np.uint64), 16)
            for shift in (0, 16)
        )
        return low | high << np.uint64(16)


ARITHMETIC = {"add": np.add, "sub": np.subtract, "div": np.divide, "mul": np.multiply}


@computes("add sub div", "rn full")
def _arithmetic(it: Instruction, a: Values, b: Values) -> npt.NDArray[Any]:
    if it.kind not in ("f32", "bf16") and it.flags:
        raise it.unknown()
    if it.kind == "s32" and it.name == "div":
        return np.trunc(numbers(it, a) / numbers(it, b)).astype(np.int64).view(np.uint64)
    return bits_of(it, ARITHMETIC[it.name](numbers(it, a), numbers(it, b)))


@computes("mul mad fma", "rn ftz lo wide hi")
def _multiply(it: Instruction, a: Values, b: Values, c: Values | None = None) -> npt.NDArray[Any]:
    named = {"f64": ("mul",), "f32": ("mul", "fma"), "bf16": ("mul", "fma")}.get(it.kind, ("mul", "mad"))
    if it.name not in named or ("hi" in it.flags and it.bits > 32):
        raise it.unknown()
    product: npt.NDArray[Any] = numbers(it, a) * numbers(it, b)
    if it.kind == "bf16":
        return bits_of(it, product if c is None else product + numbers(it, c))
    if it.kind == "f32" and c is not None:
        return bits_of(it, numbers(it, a).astype(np.float64) * numbers(it, b) + numbers(it, c))
    if it.kind in ("f32", "f64"):
        return bits_of(it, product)
    if "hi" in it.flags:
        product = product >> product.dtype.type(it.bits)
    return product.astype(np.uint64) + (0 if c is None else c)


@computes("ex2", "approx ftz")
def _power(it: Instruction, a: Values) -> npt.NDArray[Any]:
    return bits_of(it, np.exp2(numbers(it, a).astype(np.float64)))


@computes("min max", "relu xorsign abs")
def _extreme(it: Instruction, a: Values, b: Values) -> npt.NDArray[Any]:
    """Of a number and NaN the number, of both zeros the one that its sign says. relu: 0 at least.

    xorsign.abs: of magnitudes, with the product's sign.
    """
    if (it.name, *it.flags) == ("min", "xorsign", "abs"):
        return np.minimum(a & np.uint64(2**31 - 1), b & np.uint64(2**31 - 1)) | ((a ^ b) & np.uint64(2**31))
    if it.kind == "bf16" or (it.flags and it.kind != "s32"):
        raise it.unknown()
    if it.flags:
        return bits_of(it, np.maximum(np.maximum(numbers(it, a), numbers(it, b)), 0))
    lower = it.name == "min"
    first, second = numbers(it, a), numbers(it, b)
    if it.kind != "f32":
        return bits_of(it, (np.minimum if lower else np.maximum)(first, second))
    found = bits_of(it, (np.fmin if lower else np.fmax)(first, second))
    return np.where(first == second, a | b if lower else a & b, found)


@computes("abs neg")
def _signs(it: Instruction, a: Values) -> npt.NDArray[Any]:
    return bits_of(it, (np.abs if it.name == "abs" else np.negative)(numbers(it, a)))


BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@computes("and or xor")
def _bitwise(it: Instruction, a: Values, b: Values) -> npt.NDArray[Any]:
    return BITWISE[it.name](a, b)


@computes("lop3")
def _of_three(it: Instruction, a: Values, b: Values, c: Values, table: Values) -> npt.NDArray[Any]:
    """Each bit is that of `table` which the three bits of a, b and c number."""
    found = np.zeros_like(a)
    for bit in range(it.bits):
        number = sum(
            (each >> np.uint64(bit) & np.uint64(1)) << np.uint64(2 - place) for place, each in enumerate((a, b, c))
        )
        found |= (table >> number & np.uint64(1)) << np.uint64(bit)
    return found


@computes("popc")
def _count(it: Instruction, a: Values) -> npt.NDArray[Any]:
    return np.array([int(each).bit_count() for each in unsigned(a, it.bits)], np.uint64)


@computes("not")
def _not(it: Instruction, a: Values) -> npt.NDArray[Any]:
    return unsigned(~a, it.bits)


@computes("shl shr")
def _shift(it: Instruction, a: Values, by: Values) -> npt.NDArray[Any]:
    """All bits are shifted out where `by` is as wide as the value."""
    by = np.minimum(unsigned(by, 32), np.uint64(it.bits))
    if it.kind.startswith("s"):
        return numbers(it, a) >> np.minimum(by, np.uint64(63)).astype(np.int64)
    low = np.minimum(by, np.uint64(63))
    moved = a << low if it.name == "shl" else unsigned(a, it.bits) >> low
    return np.where(by == it.bits, np.uint64(0), moved)


@computes("shf", "l r wrap")
def _funnel(it: Instruction, low: Values, high: Values, by: Values) -> npt.NDArray[Any]:
    both, by = low | high << np.uint64(32), unsigned(by, 5)
    return both << by >> np.uint64(32) if "l" in it.flags else both >> by


@computes("bfe")
def _field(it: Instruction, a: Values, begin: Values, length: Values) -> npt.NDArray[Any]:
    if (begin + length > it.bits).any() or not length.all():
        raise it.unknown()
    rest = np.uint64(64) - length
    moved = a >> begin << rest
    return moved.view(np.int64) >> rest.astype(np.int64) if it.kind.startswith("s") else moved >> rest


@computes("prmt")
def _permute(it: Instruction, low: Values, high: Values, chosen: Values) -> npt.NDArray[Any]:
    """Four of eight bytes; a digit with its highest bit set takes the sign of a byte."""
    both, found = low | high << np.uint64(32), np.zeros_like(low)
    for byte in range(4):
        digit = chosen >> np.uint64(4 * byte) & np.uint64(15)
        taken = both >> (np.uint64(8) * (digit & np.uint64(7))) & np.uint64(255)
        sign = np.where(taken & np.uint64(128), np.uint64(255), np.uint64(0))
        found |= np.where(digit & np.uint64(8), sign, taken) << np.uint64(8 * byte)
    return found


COMPARED = {"eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
"""NaN is none of these."""


OF_FLOATS = {
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "geu": lambda a, b: ~np.less(a, b),
    "leu": lambda a, b: ~np.greater(a, b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@computes("setp", "eq ne neu lt le gt ge equ geu leu nan")
def _compare(it: Instruction, a: Values, b: Values) -> npt.NDArray[Any]:
    (name,) = it.flags
    differ = {"neu": np.not_equal, **OF_FLOATS} if it.kind == "f32" else {"ne": np.not_equal}
    if name not in COMPARED | differ:
        raise it.unknown()
    return np.asarray((COMPARED | differ)[name](numbers(it, a), numbers(it, b)))


@computes("selp")
def _select(it: Instruction, a: Values, b: Values, which: Values) -> npt.NDArray[Any]:
    return np.where(which, a, b)


NARROW = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def _whole(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.trunc(numbers).astype(np.int64)


EXACT: dict[tuple[str, ...], Callable[[npt.NDArray[Any]], npt.NDArray[Any]]] = {
    **{("rzi", into, kind): _whole for into in ("s32", "s64") for kind in ("f32", "f64")},
    ("rpi", "f64", "f64"): np.ceil,
    ("f64", "f32"): np.float64,
    ("rn", "f64", "s64"): np.float64,
}


@computes("cvt", "s8 u8 s16 u16 s32 u32 s64 u64 rn rzi rpi satfinite f16 f32 f64 bf16 bf16x2 e4m3x2 e5m2x2")
def _convert(it: Instruction, a: Values, b: Values | None = None) -> npt.NDArray[Any]:
    """Two float32 become two numbers of 16 or 8 bits, the first one the upper half."""
    *rounding, into = it.flags
    if rounding == ["rn", "satfinite"] and into in NARROW and b is not None:
        most = torch.finfo(NARROW[into]).max
        upper, lower = (torch.from_numpy(numbers(it, each)).clamp(-most, most).to(NARROW[into]) for each in (a, b))
        return upper.view(torch.uint8).numpy().astype(np.uint64) << np.uint64(8) | lower.view(torch.uint8).numpy()
    half = Instruction("", False, "", (), "bf16", (), it.text)
    if (rounding, into, it.kind) == (["rn"], "bf16", "f32"):
        return bits_of(half, numbers(it, a).astype(np.float64))
    if (rounding, into, it.kind) == ([], "f32", "bf16"):
        return a << np.uint64(16)
    if (rounding, into, it.kind) == (["rn"], "bf16x2", "f32") and b is not None:
        upper, lower = (bits_of(half, numbers(it, each).astype(np.float64)) for each in (a, b))
        return upper << np.uint64(16) | lower
    if (exact := EXACT.get((*it.flags, it.kind))) is not None:
        return exact(numbers(it, a)).view(np.uint64)
    if rounding == ["rn"] and into in ("f16", "f32") and it.kind[0] in "su":
        found = numbers(it, a).astype(np.float16 if into == "f16" else np.float32)
        return found.view(np.uint16 if into == "f16" else np.uint32).astype(np.uint64)
    if rounding:
        raise it.unknown()
    if it.kind[0] == "f" or it.kind == "bf16":
        raise it.unknown()
    cut = signed if into[0] == "s" else unsigned
    return cut(numbers(it, a).astype(np.uint64), int(into[1:]))
