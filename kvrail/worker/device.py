"""What a worker runs on, as its status and its metrics say."""

import resource
from functools import cache

import torch

from kvrail.config.memory import host_memory
from kvrail.rpc.report import Device


@cache
def device_name(device: torch.device) -> str:
    """A GPU's product name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def bytes_of(model: torch.nn.Module) -> int:
    """Bytes of memory that a model's parameters and buffers take; what several share counts once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def device_now(device: torch.device) -> Device:
    """The device with its memory as it is now; on a CPU, the process's largest resident memory and what it may have."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Device(device_name(device), total - free, total)
    return Device(device_name(device), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, host_memory())
