"""Which GPUs `kvrail up` may use, and how much memory a worker gets where several share one. Free of torch."""

import os
import subprocess
from pathlib import Path

from kvrail.errors import ConfigError, reason_of

GIB = 1 << 30
USED_FRACTION = 0.85
RESERVE_GIB = 1.5
"""Left to each worker for the CUDA context, activations and captured graphs."""


def visible_gpus() -> list[str]:
    """Indices or UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves, by PCI order; empty without an NVIDIA driver."""
    masked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if masked is not None:
        return [name.strip() for name in masked.split(",") if name.strip() not in ("", "-1")]
    try:
        listing = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True)
    except FileNotFoundError:
        return []
    return listing.stdout.decode().split() if listing.returncode == 0 else []


def shared_kv_memory_gib(gpu: str, workers: int, model: str) -> float:
    """GiB of pages for each of `workers` workers that share `gpu` and load `model` one each.

    Raises ConfigError where nothing is left or the model's size cannot be found.
    """
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    if answer.returncode != 0 or not answer.stdout.strip().isdecimal():
        raise ConfigError(f"{workers} workers share GPU {gpu}, whose free memory is not known; set --kv-memory-gib")
    free = int(answer.stdout) / 1024
    pages = USED_FRACTION * free / workers - weights_gib(model) - RESERVE_GIB
    if pages < 0.1:
        raise ConfigError(
            f"{workers} workers share GPU {gpu}: {free:.1f} GiB are free, too little for {workers} times {model}; "
            "use fewer workers, a smaller model or more GPUs"
        )
    return round(pages, 2)


def weights_gib(model: str) -> float:
    """Size of the safetensors files of `model`, a local folder or a Hub name, in GiB."""
    if Path(model).is_dir():
        size = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        if not size:
            raise ConfigError(f"{model} has no safetensors files that would tell its size; set --kv-memory-gib")
        return size / GIB
    from huggingface_hub import HfApi  # slow to import, and needed here alone
    from huggingface_hub.errors import HfHubHTTPError

    try:
        files = HfApi().model_info(model, files_metadata=True).siblings or []
    except (HfHubHTTPError, OSError) as error:
        raise ConfigError(f"the size of {model} is not known ({reason_of(error)}); set --kv-memory-gib") from None
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors")) / GIB
