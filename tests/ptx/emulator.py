"""PTX as Triton compiles it, run on a CPU: all threads of a block in lockstep, blocks by turns or one after another.

What lockstep would hide raises Fault: accesses of two warps that no barrier orders (`memory`), a branch that some
threads of a warp take and others do not. Threads of one warp are taken to run together. Warps that alone take a branch
forward wait where it leads to.
"""

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.ptx import instructions
from tests.ptx.instructions import BITWISE, COMPUTED, Fault, Instruction, Values, signed, unsigned
from tests.ptx.memory import Indices, Mask, Region

WARP = 32
POISON = np.uint64(0xDEADBEEFDEADBEEF)
"""In registers of threads that have written none."""
ENDED = object()
PATIENCE = 2000
"""Steps of each block, until one has ended."""
ACCESSED = {"cg", "gpu", "acquire", "param", "global", "shared", "shared::cta", "v2", "v4"}
"""Flags of loads and stores."""


@dataclass(frozen=True)
class Program:
    """A kernel. widths: bits of registers, by their names or by these without the number; shared: bytes.

    rounds: bits that sums of products are rounded to, once an instruction; 0: none are. A GPU's bits are others, but
    they too depend on an instruction's operands alone; few bits show where two kernels' sums have another order.
    """

    params: tuple[str, ...]
    threads: int
    code: tuple[Instruction, ...]
    labels: dict[str, int]
    widths: dict[str, int]
    shared: int
    rounds: int = 0

    @classmethod
    @functools.lru_cache
    def parse(cls, ptx: str, shared: int) -> "Program":
        """The kernel of a module that has one. Raises Fault where it has an instruction that is not known."""
        found = re.search(r"\.entry \w+\((.*?)\)(.*?)\n\{\n(.*?)\n\}\n", ptx, re.S)
        if found is None:
            raise Fault("no kernel")
        head, bounds, body = found.groups()
        threads = int(bounds.partition(".reqntid ")[2].split()[0])
        code: list[Instruction] = []
        labels, widths = {}, {}
        for text in _statements(body):
            if label := re.fullmatch(r"(\$?\w+):", text):
                labels[label[1]] = len(code)
            elif register := re.fullmatch(r"\.reg \.(?:pred|\w(\d+))\s+(.+)", text):
                names = (name.split("<")[0].strip() for name in register[2].split(","))
                widths.update(dict.fromkeys(names, int(register[1] or 1)))
            else:
                code.append(Instruction.parse(text))
                _check(code[-1])
        params = tuple(re.findall(r"\w+_param_\d+", head))
        return cls(params, threads, tuple(code), labels, widths, shared)


def _statements(body: str) -> list[str]:
    """Instructions, labels and registers of a kernel, without what debuggers read."""
    found = []
    for line in body.split("\n"):
        code = line.split("//")[0].strip()
        if not code.startswith((".loc", ".pragma")):
            found += [re.sub(r"^\s*\{\s*(?=\.|$)|^\s*\}\s*$", "", text).strip() for text in code.split(";")]
    return [text for text in found if text]


def _check(it: Instruction) -> None:
    """Raises Fault where an instruction is not known."""
    if it.name in COMPUTED:
        instructions.check(it)
    elif it.name not in EFFECTS or (it.name in ("ld", "st") and not ACCESSED.issuperset(it.flags)):
        raise it.unknown()


class Block:
    """A block of threads, and what its registers hold. place, sizes: its number in the grid and the grid's sizes."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[int],
        regions: list[Region],
        place: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        self.program = program
        self.arguments = dict(zip(program.params, [*arguments, 0, 0], strict=True))  # Triton adds two of its own
        self.regions = [
            replace(region, marks={}, touched=[]) for region in regions
        ]  # races are looked for within a block
        shared = max(program.shared, 1)
        self.shared = Region(0, np.zeros(shared, np.uint8), np.zeros(shared, bool))
        self.threads = np.arange(program.threads)
        self.warps, self.lanes = self.threads // WARP, self.threads % WARP
        self.registers: dict[str, Values] = {"%tid.x": self.threads.astype(np.uint64), "global_smem": self.filled(0)}
        self.registers["%laneid"] = self.lanes.astype(np.uint64)
        for axis, number, size in zip("xyz", place, sizes, strict=True):
            self.registers[f"%ctaid.{axis}"], self.registers[f"%nctaid.{axis}"] = self.filled(number), self.filled(size)
        self.ahead: dict[int, Mask] = {}  # threads that wait, by where
        for region in (*self.regions, self.shared):
            region.begin(program.threads // WARP)

    def filled(self, number: int) -> Values:
        """The same for all threads."""
        return np.full(len(self.threads), number & 2**64 - 1, np.uint64)

    def value(self, name: str) -> Values:
        """A register's or a constant's."""
        if name not in self.registers:
            if not re.fullmatch(r"-?\d+|0[xf]?[0-9A-Fa-f]+U?", name):
                raise Fault(f"{name} is read before it is written")
            number = name.rstrip("U")
            self.registers[name] = self.filled(int(number[2:], 16) if number.startswith("0f") else int(number, 0))
        return self.registers[name]

    def put(self, name: str, values: Values, active: Mask) -> None:
        """Into a register, of active threads; `_` is none."""
        if name == "_":
            return
        widths = self.program.widths
        width = widths[name] if name in widths else widths[name.rstrip("0123456789")]
        values = unsigned(values, width)
        if not active.all():
            values = np.where(active, values, self.registers.get(name, POISON & np.uint64(2**width - 1)))
        self.registers[name] = values

    def active(self, it: Instruction) -> Mask:
        """Threads for which an instruction runs."""
        here = ~np.any(list(self.ahead.values()), axis=0) if self.ahead else np.ones(len(self.threads), bool)
        if not it.guard:
            return here
        taken: Mask = self.value(it.guard) != 0
        return here & (~taken if it.negated else taken)

    def locate(self, it: Instruction, operand: str, size: int, active: Mask) -> tuple[Region, Indices]:
        """The memory that active threads name, and their offsets in it, [active]; size: bytes of each."""
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        at = self.value(base).view(np.int64)[active] + int(offset or 0)
        if (at % size).any():
            raise Fault(f"misaligned: {it.text}")
        if not {"shared", "shared::cta"}.isdisjoint(it.flags):
            return self.shared, at
        inside = [region for region in self.regions if 0 <= at[0] - region.start < len(region.data)]
        if not inside:
            raise Fault(f"outside of every tensor: {it.text}")
        return inside[0], at - inside[0].start

    def steps(self) -> Iterator[None]:
        """Until the threads return; a step ends where other blocks may have seen it. Raises Fault."""
        at: int | None = 0
        while at is not None:
            self.ahead.pop(at, None)
            it = self.program.code[at]
            at += 1
            if it.name in ("bra", "ret"):
                at = self.branch(it, at)
            elif it.name in COMPUTED:
                inputs = [self.value(operand) for operand in it.operands[1:]]
                self.put(it.operands[0], instructions.compute(it, inputs), self.active(it))
            else:
                EFFECTS[it.name](self, it, self.active(it))
                if it.name in ("atom", "red") or "acquire" in it.flags:
                    yield

    def branch(self, it: Instruction, behind: int) -> int | None:
        """Where threads go on, None: nowhere. behind: the next instruction. Raises Fault where one warp's part."""
        taken = self.active(it)
        if not taken.any():
            return behind
        target = self.program.labels[it.operands[0]] if it.name == "bra" else None
        if taken.all():
            return target
        of_warps = taken.reshape(-1, WARP)
        if target is None or target < behind or self.ahead or (of_warps.any(1) != of_warps.all(1)).any():
            raise Fault(f"some threads branch, others do not: {it.text}")
        self.ahead[target] = taken
        return behind


def run(
    program: Program, arguments: Sequence[int], regions: list[Region], place: Sequence[int], sizes: Sequence[int]
) -> None:
    """One block of a launch. arguments: numbers and addresses in `regions`; place, sizes: see Block."""
    for _ in Block(program, arguments, regions, place, sizes).steps():
        pass


def run_by_turns(
    program: Program,
    arguments: Sequence[int],
    regions: list[Region],
    sizes: Sequence[int],
    draws: random.Random,
    most: int,
) -> None:
    """All blocks of a launch, begun in any order, at most so many at once. Raises Fault where they wait for ever."""
    places = list(itertools.product(*map(range, sizes)))
    draws.shuffle(places)
    running: list[Iterator[None]] = []
    steps = 0
    while places or running:
        while places and len(running) < most:
            running.append(Block(program, arguments, regions, places.pop(), sizes).steps())
        block, steps = draws.choice(running), steps + 1
        if next(block, ENDED) is ENDED:
            running.remove(block)
            steps = 0
        if steps > PATIENCE * most:
            raise Fault(f"{len(running)} blocks wait, {len(places)} have not begun")


def _parts(operand: str) -> list[str]:
    """The registers of a vector, or the one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def _barrier(block: Block, it: Instruction, active: Mask) -> None:
    if it.flags == ("warp", "sync"):
        return
    if it.flags != ("sync",) or it.operands != ("0",) or not active.all():
        raise it.unknown()
    for region in (*block.regions, block.shared):
        region.barrier()


def _load(block: Block, it: Instruction, active: Mask) -> None:
    names, size = _parts(it.operands[0]), it.bits // 8
    if it.flags == ("param",):
        loaded = block.filled(block.arguments[it.operands[1].strip("[]")])[:, None]
    elif not active.any():
        loaded = np.zeros((0, len(names)), np.uint64)
    else:
        region, at = block.locate(it, it.operands[1], size * len(names), active)
        found = region.access("read", at[:, None] + np.arange(size * len(names)), block.warps[active], it)
        loaded = found.view(f"<u{size}").astype(np.uint64)
    for name, column in zip(names, loaded.T, strict=True):
        values = block.filled(0)
        values[active] = signed(column, it.bits).view(np.uint64) if it.kind.startswith("s") else column
        block.put(name, values, active)


def _store(block: Block, it: Instruction, active: Mask) -> None:
    names, size = _parts(it.operands[1]), it.bits // 8
    if active.any():
        stored = np.stack([unsigned(block.value(name)[active], it.bits) for name in names], 1)
        data = stored.astype(f"<u{size}").view(np.uint8)
        region, at = block.locate(it, it.operands[0], data.shape[1], active)
        region.access("write", at[:, None] + np.arange(data.shape[1]), block.warps[active], it, data)


def _copy(block: Block, it: Instruction, active: Mask) -> None:
    """From global to shared memory, at once: nothing shows that a copy is not waited for.

    Bytes that an operand leaves out are zeros.
    """
    if it.flags[1:] in (("commit_group",), ("wait_group",)):
        return
    size = int(it.operands[2], 0)
    given = block.value(it.operands[3])[active] if len(it.operands) > 3 else np.full(active.sum(), size, np.uint64)
    if it.flags[0] != "async" or it.flags[2:] != ("shared", "global") or not set(given) <= {0, size}:
        raise it.unknown()
    data, there = np.zeros((len(given), size), np.uint8), given != 0
    reading = active.copy()
    reading[active] = there
    if there.any():
        source, at = block.locate(replace(it, flags=("global",)), it.operands[1], size, reading)
        data[there] = source.access("read", at[:, None] + np.arange(size), block.warps[reading], it)
    if active.any():
        target, at = block.locate(it, it.operands[0], size, active)
        target.access("write", at[:, None] + np.arange(size), block.warps[active], it, data)


def _atomic(block: Block, it: Instruction, active: Mask) -> None:
    """One thread after another. `red` is one whose former value nobody wants."""
    combine = {"or": np.bitwise_or, "add": np.add}.get(it.flags[-1])
    if combine is None or {"relaxed", "acquire", "acq_rel"}.isdisjoint(it.flags):
        raise it.unknown()
    if not active.any():
        return
    kind, (place, operand) = f"<u{it.bits // 8}", it.operands[-2:]
    region, at = block.locate(it, place, it.bits // 8, active)
    before, given = block.filled(0), block.value(operand).astype(kind)
    for thread, offset in zip(np.flatnonzero(active), at, strict=True):
        places, warp = offset + np.arange(it.bits // 8)[None], block.warps[thread : thread + 1]
        old = region.data[places].view(kind)
        region.access("atomic", places, warp, it, combine(old, given[thread]).view(np.uint8))
        before[thread] = old[0, 0]
    if it.name == "atom":
        block.put(it.operands[0], before, active)


def _matrices(block: Block, it: Instruction, active: Mask) -> None:
    """8x8 matrices of 16 bits: eight lanes name the rows of each, and each lane has two values of each."""
    loads = it.name == "ldmatrix"
    names, place = _parts(it.operands[not loads]), it.operands[loads]
    if not active.all() or "m8n8" not in it.flags:
        raise it.unknown()
    region, at = block.locate(it, place, 16, active)
    for number, name in enumerate(names):
        rows = at.reshape(-1, WARP)[:, 8 * number : 8 * number + 8].reshape(-1, 1) + np.arange(16)
        warps = np.arange(len(rows)) // 8
        if loads:
            matrix = region.access("read", rows, warps, it).view("<u2").reshape(-1, 8, 8)
        else:
            halves = np.stack([unsigned(block.value(name) >> np.uint64(shift), 16) for shift in (0, 16)], 1)
            matrix = halves.astype("<u2").reshape(-1, 8, 8)
        if "trans" in it.flags:
            matrix = matrix.transpose(0, 2, 1)
        matrix = np.ascontiguousarray(matrix)
        if loads:
            block.put(name, matrix.reshape(-1).view("<u4").astype(np.uint64), active)
        else:
            region.access("write", rows, warps, it, matrix.view(np.uint8).reshape(-1, 16))


def _shuffle(block: Block, it: Instruction, active: Mask) -> None:
    """A value of another lane, or of the same where there is none."""
    into, given, by, bound, members = it.operands
    mode, lanes, by_lane = it.flags[-1], block.lanes, block.value(by).astype(np.int64)
    sources = {"bfly": lanes ^ by_lane, "idx": by_lane % WARP, "up": np.where(lanes < by_lane, lanes, lanes - by_lane)}
    if mode not in sources or bound != ("0" if mode == "up" else "31") or members != "-1" or not active.all():
        raise it.unknown()
    block.put(into, block.value(given)[block.warps * WARP + sources[mode]], active)


REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum, **BITWISE}


def _reduce(block: Block, it: Instruction, active: Mask) -> None:
    if it.flags[-1] not in REDUCED or not active.all():
        raise it.unknown()
    values = instructions.numbers(it, block.value(it.operands[1])).reshape(-1, WARP)
    block.put(it.operands[0], np.repeat(REDUCED[it.flags[-1]].reduce(values, 1), WARP).astype(np.uint64), active)


def _multiply(block: Block, it: Instruction, active: Mask) -> None:
    """A product of matrices, plus one. A GPU's order of sums is its own: Fault where float32 does not hold all.

    See Program.rounds.
    """
    if it.flags[:4] != ("sync", "aligned", "m16n8k16", "row") or not active.all():
        raise it.unknown()
    (into, *given), kind = map(_parts, it.operands), it.flags[-1]
    found = [np.stack([block.value(name) for name in names], 1).astype(np.uint32) for names in given]
    halves = [np.stack([each & 0xFFFF, each >> 16], 2).astype(np.uint16) for each in found[:2]]
    if kind == "bf16":
        a, b = ((each.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for each in halves)
    else:
        a, b = (each.view(np.float16).astype(np.float64) for each in halves)
    warp, g, t, i = block.warps, block.lanes // 4, block.lanes % 4 * 2, np.arange(2)
    left, right = np.zeros((warp[-1] + 1, 16, 16)), np.zeros((warp[-1] + 1, 16, 8))
    for number in range(4):
        row, column = g + number % 2 * 8, t + number // 2 * 8
        left[warp[:, None], row[:, None], column[:, None] + i] = a[:, number]
        if number < 2:
            right[warp[:, None], t[:, None] + number * 8 + i, g[:, None]] = b[:, number]
    product = left @ right
    for number, name in enumerate(into):
        sums = product[warp, g + number // 2 * 8, t + number % 2] + found[2][:, number].view(np.float32)
        if kept := block.program.rounds:
            mantissa, exponent = np.frexp(sums)
            sums = np.ldexp(np.rint(np.ldexp(mantissa, kept)), exponent - kept)
        if (sums != sums.astype(np.float32)).any():
            raise Fault(f"a sum is rounded: {it.text}")
        block.put(name, sums.astype(np.float32).view(np.uint32).astype(np.uint64), active)


def _move(block: Block, it: Instruction, active: Mask) -> None:
    """A value, or the parts of one."""
    into, given = _parts(it.operands[0]), _parts(it.operands[1])
    whole, widths = block.filled(0), [it.bits // len(parts) for parts in (given, into)]
    for number, name in enumerate(given):
        whole = whole | unsigned(block.value(name), widths[0]) << np.uint64(widths[0] * number)
    for number, name in enumerate(into):
        block.put(name, unsigned(whole >> np.uint64(widths[1] * number), widths[1]), active)


def _nothing(block: Block, it: Instruction, active: Mask) -> None:
    """Block.run has done it."""


EFFECTS: dict[str, Callable[[Block, Instruction, Mask], None]] = {
    "bra": _nothing,
    "ret": _nothing,
    "bar": _barrier,
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrices,
    "stmatrix": _matrices,
    "shfl": _shuffle,
    "redux": _reduce,
    "mov": _move,
    "mma": _multiply,
}
