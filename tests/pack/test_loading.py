"""Workers load packed models: the same weights, the same fingerprint, the same tokens."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvrail.cli.main import main
from kvrail.config.settings import DEMO_MODEL
from kvrail.engine.model import fingerprint
from kvrail.engine.model.fingerprint import fingerprint_model
from kvrail.engine.model.loader import load_model
from kvrail.engine.model.weights import plain_files
from kvrail.errors import ConfigError
from kvrail.worker.packed.weights import PackedWeights
from tests.cluster.cluster import cluster
from tests.models import generate, tiny_model
from tests.pack.folders import make_folder, tensors_of

OPTIONS = {"device": "cpu", "dtype": "auto", "kv_dtype": "bfloat16", "page_size": 64, "load_format": "safetensors"}


def packed_of(folder, target, *flags):
    assert main(["pack", str(folder), str(target), *flags]) == 0
    return target


def test_a_packed_model_is_the_plain_one(tmp_path, caplog):
    packed = packed_of(DEMO_MODEL, tmp_path / "packed")
    assert sum(path.stat().st_size for path in packed.glob("*.packed")) < 0.67 * 44_593_744
    with caplog.at_level(logging.INFO, "kvrail.packed"):
        found = PackedWeights().load(packed)
    assert "unpacked 44.6 MB of weights from 29.5 MB on disk, 33.7 % less" in caplog.text
    folder = Path(DEMO_MODEL)
    assert fingerprint_model(packed, found.files) == fingerprint_model(folder, plain_files(folder))
    expected = load_file(folder / "model.safetensors")
    assert expected.keys() == found.tensors.keys()
    assert all(torch.equal(expected[name], found.tensors[name]) for name in expected)


def test_every_type_is_loaded_as_safetensors_loads_it(tmp_path):
    folder = make_folder(tmp_path / "plain", tensors_of())
    found = PackedWeights().load(packed_of(folder, tmp_path / "packed"))
    for path in sorted(folder.glob("*.safetensors")):
        for name, expected in load_file(path).items():
            tensor = found.tensors[name]
            assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
            assert tensor.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()


def test_the_model_is_built_of_the_same_weights(tmp_path):
    folder = tiny_model("gemma3")  # its head is tied to its embedding
    packed = packed_of(folder, tmp_path / "packed")
    plain, found = load_model(str(folder), **OPTIONS), load_model(str(packed), **OPTIONS, packed=PackedWeights())
    assert found.fingerprint == plain.fingerprint
    first, second = plain.model.state_dict(), found.model.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_large_files_have_the_same_fingerprint_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_FILE_BYTES", 1000)
    folder = tiny_model("llama")
    packed = packed_of(folder, tmp_path / "packed")
    reader = PackedWeights()
    expected = load_model(str(folder), **OPTIONS).fingerprint
    assert load_model(str(packed), **OPTIONS, packed=reader).fingerprint == expected
    other = packed_of(tiny_model("llama", 1), tmp_path / "other")
    assert load_model(str(other), **OPTIONS, packed=reader).fingerprint != expected


async def test_plain_and_packed_workers_serve_the_same_tokens(tmp_path):
    folder = tiny_model("llama")
    packed = packed_of(folder, tmp_path / folder.name)
    prompt = [7 * place % 256 for place in range(300)]
    for prefill, decode in ((folder, packed), (packed, folder)):
        async with cluster(folder, prefill={"model": str(prefill)}, decode={"model": str(decode)}) as c:
            result = await c.ask(prompt, max_tokens=16)
            assert result.tokens == {0: generate(str(folder), tuple(prompt), 16)}
            assert result.summary.prefill_worker  # so the fingerprints agree


def test_a_flipped_byte_is_refused_by_file_and_tensor(tmp_path):
    packed = packed_of(tiny_model("llama"), tmp_path / "packed")
    path = packed / "model.safetensors.packed"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"tensor '[a-z_.0-9]+' of {path}: chunk 0 of 1"):
        load_model(str(packed), **OPTIONS, packed=PackedWeights())


def test_a_delta_is_refused(tmp_path):
    folder = tiny_model("llama")
    packed = packed_of(tiny_model("llama", 1), tmp_path / "packed", "--base", str(folder))
    with pytest.raises(ConfigError, match="no whole model; kvrail unpack it with --base first"):
        load_model(str(packed), **OPTIONS, packed=PackedWeights())


def test_a_type_that_torch_does_not_know_is_named(tmp_path):
    folder = tmp_path / "odd"
    shutil.copytree(tiny_model("llama"), folder)
    text = json.dumps({"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (folder / "odd.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    packed = packed_of(folder, tmp_path / "packed")
    with pytest.raises(ConfigError, match=r"tensor 'six' of .*/odd.safetensors.packed has type 'F6_E2M3'"):
        load_model(str(packed), **OPTIONS, packed=PackedWeights())
    assert main(["unpack", str(packed), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "odd.safetensors").read_bytes() == (folder / "odd.safetensors").read_bytes()
