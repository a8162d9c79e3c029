"""Forged and damaged packed files: the right bytes, or an error that names the file; never much memory."""

import json
import os
import shutil
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from kvrail.cli.main import main
from kvrail.engine.model.loader import load_model
from kvrail.errors import ConfigError
from kvrail.tools.pack import packing, unpacking
from kvrail.worker.packed import file as packed_file
from kvrail.worker.packed.file import MAGIC, digest
from kvrail.worker.packed.weights import PackedWeights
from tests.models import tiny_model
from tests.pack.folders import copy, make_folder, sums
from tests.pack.test_loading import OPTIONS

PLAIN = "model-00001-of-00002.safetensors"
NAME = f"{PLAIN}.packed"
TAIL = struct.Struct("<QQQ8s")
FIRST, SECOND = "layer.0.weight", "layer.1.weight"
WRONG = [
    *(None, True, -1, 0, 1, 1e300, 1 << 62, 1 << 63, 10**4000),
    *("", "\ud800", "y" * 5000, [], {}, [1, 2, 3]),
]
"""Values to put in place of others."""


def small_tensors():
    generator = torch.Generator().manual_seed(0)
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


class Forgery:
    """A copy of the packed folder whose first file is written again and again, and what the readers make of it."""

    def __init__(self, model, packed, place, monkeypatch):
        self.folder, self.out = copy(packed, place / "forged"), place / "out"
        self.whole = (self.folder / NAME).read_bytes()
        start, length, _, _ = TAIL.unpack(self.whole[-TAIL.size :])
        self.body, self.index = self.whole[:start], json.loads(self.whole[start : start + length])
        self.header = json.loads(bytes.fromhex(self.index["header"])[8:])
        self.most = (model / PLAIN).stat().st_size + 4096  # headers are written in other ways than theirs
        self.tensors = {**load_file(model / PLAIN), **load_file(model / PLAIN.replace("00001", "00002"))}
        self.sums = sums(model)
        monkeypatch.setattr(packed_file, "fresh", self._limited(packed_file.fresh))

    def _limited(self, fresh):
        def run(size):
            assert size <= self.most, f"{size} bytes were asked for"
            return fresh(size)

        return run

    def with_index(self, index):
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        return self.body + text + TAIL.pack(len(self.body), len(text), digest(text), MAGIC)

    def with_header(self, header):
        """The file with another header, and an index that fits."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return self.with_index(self.index | {"header": (struct.pack("<Q", len(text)) + text).hex()})

    def with_tensor(self, name, **fields):
        return self.with_header(self.header | {name: self.header.get(name, {}) | fields})

    def write(self, data):
        (self.folder / NAME).write_bytes(data)

    def refused(self, data, words=""):
        """Both readers refuse the file by its name; `kvrail unpack` has written nothing."""
        self.write(data)
        with pytest.raises(ConfigError) as error:
            PackedWeights().load(self.folder)
        message = str(error.value)
        assert str(self.folder / NAME) in message and words in message and len(message) < 1200
        assert main(["unpack", str(self.folder), str(self.out)]) == 2
        assert [path.name for path in self.out.parent.iterdir()] == ["forged"]

    def right_or_refused(self, data, unpacked=2):
        """A worker gets the right bytes, or refuses the file by its name. Whether it was refused.

        unpacked: what `kvrail unpack` then ends with.
        """
        self.write(data)
        try:
            reported: list[tuple[int, int]] = []
            found = PackedWeights().load(self.folder, lambda *done: reported.append(done)).tensors
            assert reported == sorted(reported) and all(done <= total for done, total in reported)
        except ConfigError as error:
            assert str(self.folder / NAME) in str(error)
            assert main(["unpack", str(self.folder), str(self.out)]) == unpacked
            for left in self.out.parent.glob("out*"):
                assert (left == self.out) == (unpacked == 0)
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            return True
        assert found.keys() == self.tensors.keys()
        assert all(torch.equal(found[name], self.tensors[name]) for name in found)
        return False


@pytest.fixture
def forgery(model, packed, tmp_path, monkeypatch):
    return Forgery(model, packed, tmp_path, monkeypatch)


def test_the_file_as_it_is_is_read(forgery):
    assert not forgery.right_or_refused(forgery.with_header(forgery.header))
    assert main(["unpack", str(forgery.folder), str(forgery.out)]) == 0
    assert not forgery.right_or_refused(forgery.whole)


def test_each_field_of_the_index_may_be_anything(forgery):
    index, refused = forgery.index, forgery.refused
    count = len(index["parts"])
    for value in WRONG:
        refused(forgery.with_index(value), "")
        for field in index:
            if (field, value) != ("base", None) and not (field == "version" and value == 1):
                refused(forgery.with_index(index | {field: value}))
        refused(forgery.with_index(index | {"parts": [value, *index["parts"][1:]]}))
        for at in range(3):
            part = [value if at == place else number for place, number in enumerate(index["parts"][0])]
            forged = forgery.with_index(index | {"parts": [part, *index["parts"][1:]]})
            if at == 2:  # which only decoding shows
                assert forgery.right_or_refused(forged)
            else:
                refused(forged)
        for base in ({"folder": value, "delta": [False]}, {"delta": value}, {"delta": [value] * count}):
            refused(forgery.with_index(index | {"base": {"folder": "base"} | base}))
    for field in index:
        refused(forgery.with_index({key: value for key, value in index.items() if key != field}))
    refused(forgery.with_index(index | {"parts": index["parts"][:-1]}), f"{count - 1} parts")
    refused(forgery.with_index(index | {"parts": index["parts"][::-1]}), "a part begins at byte")
    refused(forgery.with_index(index | {"base": {"folder": "b", "delta": [True] * count}}), repr(FIRST))
    text = json.dumps(index).encode()
    refused(forgery.with_index(text[:-1] + b',"version":1}'), "it has 'version' twice")
    refused(forgery.with_index(b"[" * 100_000), "nested too deeply")
    for wrong in (b"\xff", b"", text[:-1]):
        refused(forgery.with_index(wrong), "its index cannot be read")


def test_each_field_of_the_header_may_be_anything(forgery):
    header, refused = forgery.header, forgery.refused
    for value in WRONG:
        refused(forgery.with_header(value))
        refused(forgery.with_header(header | {FIRST: value}), repr(FIRST))
        for field in ("dtype", "shape", "data_offsets"):
            if field != "dtype" or not isinstance(value, str):
                refused(forgery.with_tensor(FIRST, **{field: value}))
        for field in ("shape", "data_offsets"):
            for at in range(2):
                pair = list(header[FIRST][field])
                pair[at] = value
                if pair != header[FIRST][field]:
                    refused(forgery.with_tensor(FIRST, **{field: pair}))
    for field in ("dtype", "shape", "data_offsets"):
        lacking = {key: value for key, value in header[FIRST].items() if key != field}
        refused(forgery.with_header(header | {FIRST: lacking}), repr(FIRST))
    end = max(about["data_offsets"][1] for name, about in header.items() if name != "__metadata__")
    refused(forgery.with_tensor("more", dtype="U8", shape=[1 << 62], data_offsets=[end, end + (1 << 62)]), "6 tensors")
    for shape in ([0] + [1 << 40] * 3, [1 << 62] * 100_000):
        refused(forgery.with_tensor("more", dtype="U8", shape=shape, data_offsets=[end, end]), "'more' has shape")
    text = json.dumps(header).encode()
    refused(forgery.with_header(text[:-1] + b"," + text[1:]), "twice")
    refused(forgery.with_header(b"[" * 100_000), "nested too deeply")
    for wrong in (b"\xff", b"", text[:-1]):
        refused(forgery.with_header(wrong), "cannot be read")
    raw = bytes.fromhex(forgery.index["header"])
    refused(forgery.with_index(forgery.index | {"header": (bytes([raw[0] + 1]) + raw[1:]).hex()}), "another number")


def test_a_type_that_torch_does_not_have_is_unpacked_but_not_loaded(forgery):
    for value in ("", "x", "\ud800", "F6_E2M3"):
        assert forgery.right_or_refused(forgery.with_tensor(FIRST, dtype=value), unpacked=0)
    shape = forgery.header[FIRST]["shape"]
    odd = forgery.with_tensor(FIRST, dtype="F4", shape=[4 * shape[0] * shape[1] // 15, 15])
    assert forgery.right_or_refused(odd, unpacked=0)


def test_a_tensor_that_is_larger_than_its_container_takes_no_memory(forgery):
    names = [name for name in forgery.header if name != "__metadata__"]
    last = max(names, key=lambda name: forgery.header[name]["data_offsets"])
    begin = forgery.header[last]["data_offsets"][0]
    size = 1 << 62
    forgery.refused(
        forgery.with_tensor(last, dtype="U8", shape=[size], data_offsets=[begin, begin + size]),
        f"it has {size} bytes, its container 2400",
    )


def test_containers_that_change_places_are_refused(forgery):
    (first, size, _), (second, other, _) = forgery.index["parts"][:2]
    assert second == first + size
    one, two = forgery.body[first:second], forgery.body[second : second + other]
    forged = forgery.index | {"parts": [[first, other, *forgery.index["parts"][0][2:]], *forgery.index["parts"][1:]]}
    forged["parts"][1] = [first + other, size, forgery.index["parts"][1][2]]
    forgery.body = forgery.body[:first] + two + one + forgery.body[second + other :]
    assert forgery.right_or_refused(forgery.with_index(forged))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_whatever_happens_to_the_bytes(forgery, data):
    whole = forgery.whole
    at, to, more = (data.draw(st.integers(0, len(whole))) for _ in range(3))
    kind = data.draw(st.sampled_from(["flip", "cut", "splice", "number", "forge"]))
    if kind == "flip":
        changed = bytearray(whole)
        changed[min(at, len(whole) - 1)] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        changed = whole[:at]
    elif kind == "splice":
        changed = whole[:at] + whole[min(to, more) : max(to, more)] + whole[data.draw(st.integers(0, len(whole))) :]
    elif kind == "number":
        changed = (
            whole[:at] + data.draw(st.sampled_from([b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x40"])) + whole[at + 8 :]
        )
    else:
        changed = forgery.with_index(_forged(forgery.index, data))
    forgery.right_or_refused(bytes(changed))


def _forged(value, data):
    """JSON with one of its values, wherever it lies, replaced."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return value | {key: _forged(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _forged(value[at], data), *value[at + 1 :]]
    return data.draw(st.one_of(st.sampled_from(WRONG), st.integers(), st.floats(), st.text(max_size=3)))


def stopped(model, out, monkeypatch):
    """A run of `kvrail pack` that was stopped before its end; its journal."""

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "copy_files", stop)
        with pytest.raises(KeyboardInterrupt):
            main(["pack", str(model), str(out)])
    return out.with_name(f"{out.name}.journal")


def test_a_journal_with_other_lines_is_refused_by_its_name(model, tmp_path, capsys, monkeypatch):
    journal = stopped(model, tmp_path / "out", monkeypatch)
    first, line, *rest = journal.read_bytes().splitlines(keepends=True)
    fields = json.loads(line)
    others = [(None, 1), (None, True, -1, 0.5, 1 << 63, "1"), (None, -1, "1"), (None, 0.5, "1"), (None, 1, [None], "")]
    wrong = [
        json.dumps([*fields[:at], value, *fields[at + 1 :]]).encode()
        for at, values in enumerate(others)
        for value in values
    ]
    for changed in (*wrong, *(json.dumps(value).encode() for value in WRONG), b"[" * 100_000, b"\xff", b""):
        journal.write_bytes(first + changed + b"\n" + b"".join(rest))
        assert main(["pack", str(model), str(tmp_path / "out")]) == 2
        assert f"{journal} is damaged: it names a part" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_journal_that_tells_of_other_parts_is_not_believed(model, packed, tmp_path, monkeypatch, at):
    journal = stopped(model, tmp_path / "out", monkeypatch)
    first, line, *rest = journal.read_bytes().splitlines(keepends=True)
    fields = json.loads(line)
    fields[at] = {1: 9, 2: 1 << 62, 3: 0, 4: []}[at]
    journal.write_bytes(first + json.dumps(fields).encode() + b"\n" + b"".join(rest))
    started = tmp_path / "out.partial" / NAME
    started.write_bytes(b"x" * 8 + started.read_bytes()[8:])
    assert main(["pack", str(model), str(tmp_path / "out")]) == 0
    assert sums(tmp_path / "out") == sums(packed)


def test_unpacking_goes_on_behind_the_tensors_that_the_packed_file_has(model, packed, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unpacking, "copy_files", stop)
        with pytest.raises(KeyboardInterrupt):
            main(["unpack", str(packed), str(tmp_path / "out")])
    started, journal = tmp_path / "out.partial" / PLAIN, tmp_path / "out.journal"
    first, line, *rest = journal.read_bytes().splitlines(keepends=True)
    name, offset, size, _, note = json.loads(line)
    forged = started.read_bytes()
    forged = bytes(offset) + b"forged" + forged[offset + 6 :]
    started.write_bytes(forged)
    line = json.dumps([name, offset, size, digest(forged[offset : offset + size]), note]).encode() + b"\n"
    journal.write_bytes(first + line + b"".join(rest))
    assert main(["unpack", str(packed), str(tmp_path / "out")]) == 0
    assert sums(tmp_path / "out") == sums(model)


def test_a_folder_does_not_hold_a_file_in_both_forms(model, packed, tmp_path, capsys):
    for folder, command, name in ((packed, "unpack", PLAIN), (model, "pack", NAME)):
        both = copy(folder, tmp_path / command)
        (both / name).write_bytes(b"other")
        assert main([command, str(both), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert f"{both} has both" in error and PLAIN in error and NAME in error
        assert not list(tmp_path.glob("out*"))


def test_links_are_copied_as_files_of_the_folder_or_refused(packed, tmp_path, capsys):
    hub = tmp_path / "hub"
    (hub / "blobs").mkdir(parents=True)
    folder = copy(packed, hub / "snapshots" / "main")
    for path in [*folder.glob("*.packed"), folder / "config.json"]:
        path.rename(hub / "blobs" / path.name)
        path.symlink_to(hub / "blobs" / path.name)
    assert main(["unpack", str(folder), str(tmp_path / "first")]) == 0
    assert (tmp_path / "first" / "config.json").read_text() == (packed / "config.json").read_text()
    assert not (tmp_path / "first" / "config.json").is_symlink()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    for target in ("secret/key", "secret", "absent"):
        (folder / "below" / "link").symlink_to(tmp_path / target)
        assert main(["unpack", str(folder), str(tmp_path / "out")]) == 2
        assert f"{folder / 'below' / 'link'} is" in capsys.readouterr().err
        assert not list(tmp_path.glob("out*"))
        (folder / "below" / "link").unlink()


@pytest.mark.parametrize("kind", ["folder", "pipe", "absent", "empty"])
def test_what_is_no_file_is_refused_by_its_name(packed, model, tmp_path, capsys, kind):
    for source, command, name in ((packed, "unpack", NAME), (model, "pack", PLAIN)):
        folder = copy(source, tmp_path / command)
        path = folder / name
        path.unlink()
        make = {"folder": path.mkdir, "pipe": lambda path=path: os.mkfifo(path), "empty": path.touch}
        make.get(kind, lambda path=path: path.symlink_to("absent"))()
        assert main([command, str(folder), str(tmp_path / "out")]) == 2
        assert str(path) in capsys.readouterr().err
        assert not list(tmp_path.glob("out*.safetensors*"))
        if command == "unpack":
            with pytest.raises(ConfigError, match=str(path)):
                PackedWeights().load(folder)


def test_a_tensor_of_two_files_is_refused(packed, tmp_path):
    folder = copy(packed, tmp_path / "twice")
    (folder / "zzz.safetensors.packed").write_bytes((folder / NAME).read_bytes())
    with pytest.raises(ConfigError, match=r"tensor 'layer.* of .*/zzz.* is in another file of its folder too"):
        PackedWeights().load(folder)


def test_a_model_without_one_of_its_packed_files_or_tensors_is_not_made_up(tmp_path):
    folder, plain = tmp_path / "packed", tmp_path / "plain"
    shutil.copytree(tiny_model("llama"), plain)
    tensors = load_file(plain / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    for changed, words in (
        ({key: value for key, value in tensors.items() if key != name}, f"have no tensor '{name}'"),
        (tensors | {name: tensors[name][:-1].contiguous()}, rf"tensor '{name}' in .* has shape \[63, 64\], but"),
    ):
        save_file(changed, plain / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        assert main(["pack", str(plain), str(folder)]) == 0
        for model in (plain, folder):
            with pytest.raises(ConfigError, match=words):
                load_model(str(model), **OPTIONS, packed=PackedWeights())
