"""What is told while weights are loaded, and of files whose headers are damaged."""

import json
import shutil
import struct

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from kvrail.engine.model.header import CODED_AS, element_bits
from kvrail.engine.model.loader import load_model
from kvrail.engine.model.loading import tensor_bytes
from kvrail.errors import ConfigError
from tests.engine.test_loader import OPTIONS
from tests.models import tiny_model


def test_tells_how_many_bytes_of_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("kvrail.engine.model.loading.LOG_S", -1.0)
    caplog.set_level("INFO", "kvrail.worker")
    folder = tiny_model("llama")
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert sum(tensor_bytes(folder).values()) == total
    monkeypatch.setattr("kvrail.engine.model.loading.GB", 1.0)
    reported = []
    load_model(str(folder), **OPTIONS, progress=lambda *found: reported.append(found))
    assert reported[0] == (0, total) and reported[-1] == (total, total) and reported == sorted(reported)
    lines = [record.getMessage() for record in caplog.records if "loading weights" in record.getMessage()]
    assert lines[0].startswith(f"loading weights: {total:.2f} GB in ")
    done = [float(line.split()[2]) for line in lines[1:]]
    assert len(done) > 10
    assert done == sorted(done)
    assert done[-1] == total


HEADERS = {
    "list": b"[]",
    "number": b"1",
    "deep": b"[" * 100_000,
    "no text": b"\xff",
    "null": b'{"a":null}',
    "no shape": b'{"a":{"dtype":"U8","data_offsets":[0,1]}}',
    "text": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":"01"}}',
    "fraction": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1.0]}}',
    "backwards": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}',
    "gap": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
    "shape": b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}',
    "huge": b'{"a":{"dtype":"U8","shape":[4611686018427387904],"data_offsets":[0,4611686018427387904]}}',
    "twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_forged_header_is_refused_by_its_file(tmp_path, kind):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(HEADERS[kind])) + HEADERS[kind] + b"a")
    with pytest.raises(ConfigError, match=str(path)):
        load_model(str(folder), **OPTIONS)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, None])
def test_a_file_that_is_cut_off_is_refused_by_its_name(tmp_path, size):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 99_999_999) + whole[8:] if size is None else whole[:size])
    with pytest.raises(ConfigError, match=str(path)):
        load_model(str(folder), **OPTIONS)


def test_headers_are_taken_as_safetensors_takes_them(tmp_path):
    """Each type that safetensors stores has the size that it has there."""
    for dtype in CODED_AS:
        path, size = tmp_path / "a.safetensors", element_bits(dtype)
        text = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
        with safe_open(path, "pt") as file:
            assert file.get_slice("a").get_dtype() == dtype
        assert tensor_bytes(tmp_path) == {"a": size}
