"""Memory that threads share, of a block and of tensors, and the races in it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.ptx.instructions import Fault, Instruction

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


class Race(Fault):
    """No barrier orders two accesses."""


CLASHES = {"read": ("write", "atomic"), "write": ("read", "write", "atomic"), "atomic": ("read", "write")}
"""An access: what another warp may not have done to the same byte since the last barrier."""


@dataclass
class Region:
    """Memory from address `start` on: uint8. written: whether each byte is, where it need be before it is read."""

    start: int
    data: Bytes
    written: Mask | None = None
    marks: dict[str, Mask] = field(default_factory=dict)
    """An access: bool [warps, bytes], which were made since the last barrier."""
    touched: list[tuple[str, Indices]] = field(default_factory=list)

    def begin(self, warps: int) -> None:
        """A block begins."""
        if len(self.marks.get("read", ())) != warps:
            self.marks = {kind: np.zeros((warps, len(self.data)), bool) for kind in CLASHES}
        self.barrier()

    def barrier(self) -> None:
        """What was done is ordered before what follows."""
        for kind, at in self.touched:
            self.marks[kind][:, at] = False
        self.touched.clear()

    def access(self, kind: str, at: Indices, warps: Indices, it: Instruction, data: Bytes | None = None) -> Bytes:
        """Bytes [n, size] at offsets [n, size] as they were; `data` are put there. warps: [n], who does it.

        Raises Fault where what is read was never written, Race where no barrier orders this after another access.
        Two warps may write the same.
        """
        if at.min() < 0 or at.max() >= len(self.data):
            raise Fault(f"outside of memory: {it.text}")
        before = self.data[at]
        for other in CLASHES[kind]:
            clashes = self.marks[other][:, at].sum(0) > self.marks[other][warps[:, None], at]
            if other == "write" and kind == "write":
                clashes &= before != data
            if clashes.any():
                raise Race(f"{kind} after another warp's {other}, and no barrier between: {it.text}")
        self.marks[kind][warps[:, None], at] = True
        self.touched.append((kind, at))
        if self.written is not None:
            if kind != "write" and not self.written[at].all():
                raise Fault(f"read before it is written: {it.text}")
            self.written[at] = True
        if data is not None:
            self.data[at] = data
            if (self.data[at] != data).any():
                raise Race(f"threads write different bytes to one place: {it.text}")
        return before
