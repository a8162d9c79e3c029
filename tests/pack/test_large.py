"""`kvrail pack` and `unpack` of a model of 1 GB, killed ten times each: make test-pack-large."""

import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvrail.cli.main import main
from kvrail.worker.packed.file import PackedFile
from tests.pack.folders import sums

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3600)]

LAYERS, SHARDS = 24, 4
KILLS = 10
RUN = "import sys; from kvrail.cli.main import main; sys.exit(main(sys.argv[1:]))"


def layer_of(number, generator):
    def normal(*shape):
        return (0.01 + 0.001 * number) * torch.randn(*shape, generator=generator)

    return {
        f"layer.{number}.attention": normal(2500, 4000).bfloat16(),
        f"layer.{number}.gate": normal(1000, 4000).half(),
        f"layer.{number}.up": normal(500, 4000),
        f"layer.{number}.down": (4000 * normal(2000, 2750)).to(torch.float8_e4m3fn),
        f"layer.{number}.scales": (9000 * normal(100, 2750).abs()).to(torch.float8_e4m3fn),
        f"layer.{number}.norm": normal(4001),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    generator = torch.Generator().manual_seed(0)
    for shard in range(SHARDS):
        tensors = {}
        for number in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            tensors.update(layer_of(number, generator))
        save_file(tensors, folder / f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors", metadata={"format": "pt"})
    assert sum(path.stat().st_size for path in folder.iterdir()) > 1_000_000_000
    return folder


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    """The model packed, by a run that nothing stopped."""
    out = tmp_path_factory.mktemp("packed") / "model"
    assert main(["pack", str(model), str(out)]) == 0
    return out


def changed_at(path):
    return path.stat().st_mtime_ns if path.exists() else None


def killed_on_the_way(rng, longest, command, source, out):
    """Start a process, kill it (9) within `longest` seconds after it took the journal; whether it had not ended."""
    journal = out.with_name("out.journal")
    before = changed_at(journal)
    child = subprocess.Popen([sys.executable, "-c", RUN, command, str(source), str(out)], stdout=subprocess.DEVNULL)
    while changed_at(journal) == before and child.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, longest))
    child.kill()
    return child.wait() != 0


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_killed_at_ten_random_moments_it_goes_on(model, packed, tmp_path, command):
    source, expected = (model, sums(packed)) if command == "pack" else (packed, sums(model))
    whole = tmp_path / "whole"
    begun = time.monotonic()
    assert main([command, str(source), str(whole)]) == 0
    duration = time.monotonic() - begun
    assert sums(whole) == expected
    rng, out, kills, runs = np.random.default_rng(7), tmp_path / "out", 0, 0
    partial, written = out.with_name("out.partial"), []
    while kills < KILLS:
        runs += 1
        assert runs < 20 * KILLS
        if killed_on_the_way(rng, 0.3 * duration, command, source, out):
            kills += 1
            written.append(sum(path.stat().st_size for path in partial.glob("*")))
            assert not out.exists() or sums(out) == expected
        elif kills < KILLS:
            assert sums(out) == expected
            out.rename(tmp_path / f"done{runs}")
    if not out.exists():
        assert partial.exists()
        assert main([command, str(source), str(out)]) == 0
    assert sums(out) == expected
    assert not partial.exists() and not out.with_name("out.journal").exists()
    assert len({size for size in written if size}) >= KILLS // 2, written  # the kills came while it was at work


def test_a_flipped_byte_is_refused_by_file_and_tensor(packed, tmp_path, capsys):
    rng = np.random.default_rng(11)
    for number, path in enumerate(sorted(packed.glob("*.packed"))):
        with PackedFile(path) as sound:
            spans = [
                (part.offset, part.size, tensor.name)
                for part, tensor in zip(sound.parts, sound.header.tensors, strict=True)
            ]
        offset, size, name = spans[rng.integers(len(spans))]
        flip(path, place := offset + int(rng.integers(size)))
        assert main(["unpack", str(packed), str(tmp_path / f"out{number}")]) == 2
        flip(path, place)
        assert f"tensor {name!r} of {path}" in capsys.readouterr().err
        assert not (tmp_path / f"out{number}").exists()
    assert main(["unpack", str(packed), str(tmp_path / "sound")]) == 0


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
