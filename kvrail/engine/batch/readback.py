"""Small results from the device to the host."""

from typing import Any

import torch


def to_list(tensor: torch.Tensor) -> list[Any]:
    """Return what `tensor.tolist()` returns, without its lock.

    A copy from CUDA goes to pinned memory and ends with an event. A plain copy into pageable memory holds the driver
    while it waits for the step to end, and with it every other thread that copies pages: transfers then advance by one
    frame a decode step.
    """
    return Readback(tensor).wait()


class Enqueued:
    """The work that a device has when this is made; a CPU has done it by then."""

    def __init__(self, device: torch.device) -> None:
        self._end: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._end.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until it is done."""
        if self._end is not None:
            self._end.synchronize()


class Readback:
    """A copy to the host, enqueued behind the work that computes the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        self._copied = Enqueued(tensor.device)

    def wait(self) -> list[Any]:
        """Wait for the elements."""
        self._copied.wait()
        return self._host.tolist()
