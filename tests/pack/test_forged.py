"""Forged and damaged packed files: the right bytes, or an error that names the file. Nothing else, and no memory."""

import json
import os
import shutil
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvrail.errors import ConfigError
from kvrail.services.cli.main import main
from kvrail.services.packed import file as packed_file
from kvrail.services.packed.file import MAGIC, PackedFile, digest
from kvrail.services.packed.weights import PackedWeights
from tests.pack.folders import copy, make_folder, sums

NAME = "model-00001-of-00002.safetensors.packed"
TAIL = struct.Struct("<QQQ8s")


def small_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = {f"layer.{at}.weight": torch.randn(30, 40, generator=generator).bfloat16() for at in range(5)}
    return rows | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 5), "zeros": torch.zeros(500)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("plain") / "model", small_tensors())


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "model"
    assert main(["pack", str(model), str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def forged(packed, tmp_path_factory):
    """A copy of the packed folder whose first file tests write anew."""
    return copy(packed, tmp_path_factory.mktemp("forged") / "model")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def parts_of(data):
    """Containers, index and header's JSON of a packed file."""
    start, length, _, _ = TAIL.unpack(data[-TAIL.size :])
    index = json.loads(data[start : start + length])
    return data[:start], index, json.loads(bytes.fromhex(index["header"])[8:])


def with_index(body, index, start=None):
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    return body + text + TAIL.pack(len(body) if start is None else start, len(text), digest(text), MAGIC)


def with_header(data, header):
    """The file with another header, given as JSON or as bytes, and an index that fits."""
    body, index, _ = parts_of(data)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return with_index(body, index | {"header": (struct.pack("<Q", len(text)) + text).hex()})


def load(folder):
    return {name: tensor.clone() for name, tensor in PackedWeights().load(folder).tensors.items()}


def assert_refused(folder, scratch, capsys, words=""):
    """Both readers refuse the folder by the name of its first file, and nothing is left of what they made."""
    path = folder / NAME
    with pytest.raises(ConfigError) as error:
        PackedWeights().load(folder)
    assert str(path) in str(error.value) and words in str(error.value)
    assert len(str(error.value)) < 1000
    out = scratch / "out"
    assert main(["unpack", str(folder), str(out)]) == 2
    assert str(path) in capsys.readouterr().err
    assert list(scratch.iterdir()) == []


WRONG = [None, True, -1, 0, 1, 0.5, 1e300, 1 << 62, 1 << 63, 1 << 64, 10**400, "", "x", "\ud800", [], [[]], {}, [1, 2, 3]]
"""Values to put in place of others."""


def test_each_field_of_the_index_may_be_anything(packed, forged, scratch, capsys, monkeypatch):
    whole = (packed / NAME).read_bytes()
    body, index, _ = parts_of(whole)
    monkeypatch.setattr(packed_file, "fresh", limited(packed_file.fresh, 100_000), raising=False)

    def refused(changed):
        (forged / NAME).write_bytes(with_index(body, changed))
        assert_refused(forged, scratch, capsys)

    for value in WRONG:
        refused(value)
        for field in index:
            if (field, value) not in [("base", None), ("version", 1)] or value is True:
                refused(index | {field: value})
        refused(index | {"parts": [value, *index["parts"][1:]]})
        for at in range(3):
            part = [value if at == place else number for place, number in enumerate(index["parts"][0])]
            refused(index | {"parts": [part, *index["parts"][1:]]})
        refused(index | {"base": {"folder": value, "delta": [False] * 5}})
        refused(index | {"base": {"folder": "base", "delta": value}})
        refused(index | {"base": {"folder": "base", "delta": [value] * 5}})
    for field in index:
        refused({key: value for key, value in index.items() if key != field})
    refused(index | {"parts": index["parts"][:-1]})
    refused(index | {"parts": index["parts"][::-1]})
    refused(index | {"parts": [*index["parts"], [len(body), 0, 0]]})
    refused(index | {"base": {"folder": "base", "delta": [True] * 5}})
    for text in (b"[" * 100_000, b"\xff", b"", json.dumps(index).encode()[:-1] + b',"version":1}'):
        refused(text)


def test_each_field_of_the_header_may_be_anything(packed, forged, scratch, capsys, monkeypatch):
    whole = (packed / NAME).read_bytes()
    _, _, header = parts_of(whole)
    monkeypatch.setattr(packed_file, "fresh", limited(packed_file.fresh, 100_000), raising=False)
    first, second = (f"layer.{at}.weight" for at in range(2))

    def refused(changed, words=""):
        (forged / NAME).write_bytes(with_header(whole, changed))
        assert_refused(forged, scratch, capsys, words)

    for value in WRONG:
        refused(value)
        refused(header | {first: value}, repr(first))
        for field in ("dtype", "shape", "data_offsets"):
            refused(header | {first: header[first] | {field: value}})
        for field in ("shape", "data_offsets"):
            refused(header | {first: header[first] | {field: [value, header[first][field][1]]}} if value != 0 or field == "shape" else 1)
            refused(header | {first: header[first] | {field: [header[first][field][0], value]}})
    for field in ("dtype", "shape", "data_offsets"):
        refused(header | {first: {key: value for key, value in header[first].items() if key != field}}, repr(first))
    refused(header | {first: header[second], second: header[first]} | {first: header[second]})
    refused(header | {"more": {"dtype": "U8", "shape": [1 << 62], "data_offsets": [12_000, 12_000 + (1 << 62)]}})
    refused(header | {"more": {"dtype": "U8", "shape": [0] + [1 << 62] * 3, "data_offsets": [12_000, 12_000]}})
    refused(header | {"more": {"dtype": "U8", "shape": [1 << 62] * 100_000, "data_offsets": [12_000, 12_000]}})
    for text in (b"[" * 100_000, b"\xff", b"", json.dumps(header).encode()[:-1] + b"," + json.dumps(header).encode()[1:]):
        refused(text)


def limited(fresh, most):
    """`fresh` that fails a test where it is asked for more than `most` bytes."""

    def run(size):
        assert size <= most, f"{size} bytes were asked for"
        return fresh(size)

    return run
