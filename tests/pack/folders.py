"""Models' folders to pack: small, with every kind of tensor that files have."""

import hashlib
import json
import shutil

import torch
from safetensors.torch import save_file


def tensors_of(seed=0, scale=1.0, size=300_000):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return scale * 0.02 * torch.randn(*shape, generator=generator)

    return {
        "embed.weight": normal(size // 100, 100).bfloat16(),
        "layer.0.up.weight": normal(size // 200, 100).half(),
        "layer.0.norm.weight": normal(77),
        "layer.0.odd": torch.arange(33, dtype=torch.uint8),  # what follows begins at an odd byte
        "layer.0.down.weight": (normal(size // 50, 50) * 5000).to(torch.float8_e4m3fn),
        "layer.1.scales": (normal(size // 10).abs() * 3000).to(torch.float8_e4m3fn),
        "layer.1.positions": torch.arange(1000),
        "layer.1.empty": torch.empty(0, 5),
        "layer.1.scalar": torch.tensor(3.5, dtype=torch.float64),
        "layer.1.mask": torch.rand(999, generator=generator) < 0.1,
        "head.weight": normal(size // 100, 100).bfloat16(),
    }


def make_folder(folder, tensors):
    """Two shards with their index, a configuration, a file in a folder below."""
    folder.mkdir()
    names, shards = list(tensors), {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt", "z": "ä", "a": "1"})
        shards.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "below").mkdir()
    (folder / "below" / "notes.txt").write_text("as they are")
    return folder


def sums(folder):
    """sha256 of each file, by its path in the folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def copy(folder, target):
    shutil.copytree(folder, target)
    return target
