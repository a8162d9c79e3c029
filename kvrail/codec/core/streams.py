"""CUDA streams and events of encodings; on a CPU, where all is done at once, there are none."""

import functools

import torch


def record(device: torch.device) -> torch.cuda.Event | None:
    """An event at the end of the device's current stream; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies that shall not wait for what else is queued; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
