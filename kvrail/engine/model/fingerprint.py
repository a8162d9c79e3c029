"""A digest that is equal on every worker that serves the same model, and cheap for tens of gigabytes."""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrail.engine.model.weights import WeightFile

WHOLE_FILE_BYTES = 64 << 20
"""Weight files up to this size are hashed whole."""
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation"})


def fingerprint_model(folder: Path, files: Sequence[WeightFile]) -> str:
    """sha256 over config.json of `folder` and the model's safetensors files, however they are stored.

    config.json: parsed, without keys that do not affect the model's results, keys sorted. Each weight file, in order of
    name: its size, its header (names, types and shapes of all tensors), and its contents: whole up to 64 MiB, else
    256 samples of 4 KiB spread evenly. Two trainings differ in nearly every byte, so a difference cannot hide between
    samples by accident; this is no defence against someone who forges weights on purpose.
    """
    digest = hashlib.sha256()
    with (folder / "config.json").open(encoding="utf-8") as file:
        _add(digest, _canonical(json.load(file)))
    for weights in files:
        _add(digest, weights.name.encode())
        _add_weights(digest, weights)
    return digest.hexdigest()


def fingerprint_dummy(config: Any, seed: int) -> str:
    """sha256 over the configuration and the seed of random weights."""
    digest = hashlib.sha256(b"dummy")
    _add(digest, _canonical(json.loads(config.to_json_string(use_diff=True))))
    _add(digest, str(seed).encode())
    return digest.hexdigest()


def _canonical(config: dict[str, Any]) -> bytes:
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _add_weights(digest: "hashlib._Hash", file: WeightFile) -> None:
    digest.update(struct.pack("<Q", file.size))
    if file.size <= WHOLE_FILE_BYTES:
        digest.update(file.read(0, file.size))
        return
    header_bytes = struct.unpack("<Q", file.read(0, 8))[0]
    _add(digest, file.read(8, header_bytes))
    begin = 8 + header_bytes
    stride = (file.size - begin - _SAMPLE_BYTES) / (_SAMPLES - 1)
    for sample in range(_SAMPLES):
        digest.update(file.read(begin + int(sample * stride), _SAMPLE_BYTES))
