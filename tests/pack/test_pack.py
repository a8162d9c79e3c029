"""`kvrail pack` and `kvrail unpack`: the very same files, deltas, refusals that name what is wrong."""

import errno
import os
import re
import shutil
import signal
import struct
import sys
import threading

import numpy as np
import pytest

from kvrail.cli.main import main
from kvrail.engine.model.header import parse_header
from kvrail.errors import ConfigError
from kvrail.runtime import progress
from kvrail.tools.pack import journal, packing
from kvrail.worker.packed import file as packed_file
from kvrail.worker.packed.file import PackedFile
from tests.pack.folders import copy, make_folder, sums, tensors_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("plain") / "model", tensors_of())


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "model"
    assert main(["pack", str(model), str(out), "--verify"]) == 0
    return out


@pytest.fixture
def kvrail(capsys):
    """Runs a command; gives its exit status and what it said on stderr."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, capsys.readouterr().err

    return run


def test_every_file_comes_back_as_it_was(model, packed, tmp_path, kvrail):
    assert kvrail("unpack", packed, tmp_path / "out", "--verify") == (0, "")
    assert sums(tmp_path / "out") == sums(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    weights = [path for path in sums(packed) if ".safetensors" in path and not path.endswith(".json")]
    assert weights == [f"model-0000{number}-of-00002.safetensors.packed" for number in (1, 2)]
    plain = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert sum((packed / path).stat().st_size for path in weights) < 0.75 * plain


def test_where_there_is_no_bar_lines_say_how_far_it_is(model, tmp_path, kvrail, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.001)
    status, said = kvrail("pack", model, tmp_path / "out")
    assert status == 0
    assert re.search(r"^packing: \d\.\d\d of \d\.\d\d GB, 0 s so far$", said, re.MULTILINE), said


def test_a_delta_is_small_and_needs_its_base(model, tmp_path, kvrail):
    before, step = tensors_of(), tensors_of(seed=9, scale=0.01)
    near = {
        name: (before[name].float() + step[name].float()).to(before[name].dtype)
        if before[name].is_floating_point() and before[name].dtype.itemsize == 2
        else before[name]
        for name in before
    }
    near["head.weight"] = near["head.weight"][:-1].contiguous()  # has no counterpart: it is packed by itself
    later = make_folder(tmp_path / "later", near)
    assert kvrail("pack", later, tmp_path / "delta", "--base", model, "--verify") == (0, "")
    with PackedFile(tmp_path / "delta" / "model-00001-of-00002.safetensors.packed") as first:
        assert all(first.base.delta)
        assert sum(part.size for part in first.parts) < 0.40 * first.header.file_bytes
    with PackedFile(tmp_path / "delta" / "model-00002-of-00002.safetensors.packed") as second:
        assert (
            dict(zip((t.name for t in second.header.tensors), second.base.delta, strict=True))["head.weight"] is False
        )
    assert kvrail("unpack", tmp_path / "delta", tmp_path / "out", "--base", model) == (0, "")
    assert sums(tmp_path / "out") == sums(later)

    status, error = kvrail("unpack", tmp_path / "delta", tmp_path / "none")
    assert status == 2 and f"has deltas against {str(model)!r}; give that folder as --base" in error
    status, error = kvrail("unpack", tmp_path / "delta", tmp_path / "wrong", "--base", later)
    assert status == 2 and "is not the one that this delta was encoded with" in error and "of " in error
    status, error = kvrail("unpack", tmp_path / "delta", tmp_path / "empty", "--base", tmp_path)
    assert status == 2 and f"--base {tmp_path} has no safetensors files" in error
    assert not any((tmp_path / name).exists() for name in ("none", "wrong", "empty"))


def test_each_flipped_byte_is_refused_by_file_and_tensor(packed, tmp_path, kvrail):
    damaged = copy(packed, tmp_path / "damaged")
    path = damaged / "model-00001-of-00002.safetensors.packed"
    whole = path.read_bytes()
    with PackedFile(path) as sound:
        owners = [
            (part.offset, part.offset + part.size, tensor.name)
            for part, tensor in zip(sound.parts, sound.header.tensors, strict=True)
        ]
    places = [*np.random.default_rng(3).integers(0, len(whole), 25).tolist(), 0, 8, len(whole) - 1, len(whole) - 30]
    for number, place in enumerate(places):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        status, error = kvrail("unpack", damaged, tmp_path / f"out{number}")
        assert status == 2 and str(path) in error, place
        for begin, end, name in owners:
            assert not begin <= place < end or f"tensor {name!r} of {path}" in error
        assert not (tmp_path / f"out{number}").exists()
    path.write_bytes(whole[: len(whole) // 2])
    status, error = kvrail("unpack", damaged, tmp_path / "cut")
    assert status == 2 and str(path) in error and "damaged" in error


@pytest.mark.parametrize(
    ("source", "out", "words"),
    [
        ("absent", "new", "absent is no folder; name a folder that has a model"),
        ("bare", "new", "bare has no files *.safetensors; name the folder of a model in safetensors files"),
        ("model", "bare", "bare exists already; name another folder or delete it"),
        ("model", "model/within", "lies within"),
        ("model", "no/such/place", "No such file or directory"),
        ("model", "model/config.json/new", "lies within"),
    ],
)
def test_what_cannot_be_packed_is_named(model, tmp_path, kvrail, source, out, words):
    copy(model, tmp_path / "model")
    (tmp_path / "bare").mkdir()
    before = sums(tmp_path)
    status, error = kvrail("pack", tmp_path / source, tmp_path / out)
    assert status == 2 and words in error.replace("\n", " "), error
    assert sums(tmp_path) == before


@pytest.mark.parametrize("out", [".", "/"])
def test_a_folder_without_a_name_exists_already(model, tmp_path, kvrail, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    status, error = kvrail("pack", model, out)
    assert status == 2 and f"OUT {out} exists already" in error.replace("\n", " ")


def test_files_that_are_read_only_stay_so(model, tmp_path, kvrail, monkeypatch):
    """Root may write what is read-only, others may not: no such file is open when it is put on the disk."""
    fsync, modes = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda handle: modes.append(os.fstat(handle).st_mode) or fsync(handle))
    source = copy(model, tmp_path / "source")
    (source / "config.json").chmod(0o444)
    copied = tmp_path / "out.partial" / "config.json"
    with monkeypatch.context() as patch:
        patch.setattr(journal, "sync_folder", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kvrail("pack", source, tmp_path / "out")
    assert copied.stat().st_mode & 0o777 == 0o444
    assert kvrail("pack", source, tmp_path / "out") == (0, "")
    assert kvrail("unpack", tmp_path / "out", tmp_path / "back") == (0, "")
    assert (tmp_path / "back" / "config.json").stat().st_mode & 0o777 == 0o444
    assert modes and all(mode & 0o200 for mode in modes)


def test_a_torn_safetensors_file_is_named(model, tmp_path, kvrail):
    torn = copy(model, tmp_path / "torn")
    path = torn / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    status, error = kvrail("pack", torn, tmp_path / "out")
    assert status == 2 and str(path) in error and "its header says" in error


def test_headers_with_gaps_are_refused():
    def header(begin):
        text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}' % (begin, begin + 1)
        return struct.pack("<Q", len(text)) + text

    assert parse_header(header(0), "x").tensors[0].name == "a"
    for wrong in (header(1), header(0)[:-2], b"\0" * 8):
        with pytest.raises(ConfigError, match="x"):
            parse_header(wrong, "x")


def test_a_full_disk_is_told_and_the_same_command_goes_on(model, tmp_path, kvrail, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", full)
        status, error = kvrail("pack", model, tmp_path / "out")
    assert status == 1 and f"no space is left for {tmp_path / 'out'}" in error and "goes on where it stopped" in error
    assert not (tmp_path / "out").exists()
    coded = []
    monkeypatch.setattr(packing, "_pack_tensor", watched(packing._pack_tensor, coded))
    assert kvrail("pack", model, tmp_path / "out") == (0, "")
    assert len(coded) == 6  # those of the second file; the first had been written
    assert kvrail("unpack", tmp_path / "out", tmp_path / "back") == (0, "") and sums(tmp_path / "back") == sums(model)


def watched(function, calls):
    def run(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return run


def run_in_child(*arguments, kill_at=None):
    """Run a command in a child, killed at so many calls after its work began: whether it was killed, and its calls."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += bool(calls) or frame.f_code is journal.work_on.__wrapped__.__code__
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        threading.setprofile(count)
        sys.setprofile(count)
        status = main([str(argument) for argument in arguments])
        sys.setprofile(None)
        os.write(write, str(calls).encode())
        os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with open(read) as told:
        calls = told.read()
    assert status == 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    return status != 0, int(calls or 0)


@pytest.mark.parametrize("command", ["pack", "unpack"])
def test_killed_at_random_moments_it_goes_on(model, packed, tmp_path, kvrail, command):
    source, expected = (model, packed) if command == "pack" else (packed, model)
    rng = np.random.default_rng(5)
    killed, calls = run_in_child(command, source, tmp_path / "whole")
    assert not killed
    out, kills, midway = tmp_path / "out", 0, 0
    while kills < 10:
        killed, _ = run_in_child(command, source, out, kill_at=rng.integers(1, calls))
        kills += killed
        midway += out.with_name("out.partial").exists()
        assert not out.exists() or sums(out) == sums(expected)
        if out.exists() and not out.with_name("out.journal").exists():  # nothing is left to do: from the beginning
            out.rename(tmp_path / f"done{rng.integers(1 << 30)}")
    assert midway
    if not out.exists() or out.with_name("out.journal").exists():
        assert kvrail(command, source, out)[0] == 0
    assert sums(out) == sums(expected)
    assert not out.with_name("out.partial").exists()


def test_parts_that_are_not_as_the_journal_tells_are_made_anew(model, packed, tmp_path, kvrail, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "copy_files", stop)
        with pytest.raises(KeyboardInterrupt):
            kvrail("pack", model, tmp_path / "out")
    first = tmp_path / "out.partial" / "model-00001-of-00002.safetensors.packed"
    first.write_bytes(first.read_bytes()[:2000])
    with (tmp_path / "out.journal").open("ab") as file:
        file.write(b'["model-00001-of-0000')  # the last line was cut off
    assert kvrail("pack", model, tmp_path / "out") == (0, "")
    assert sums(tmp_path / "out") == sums(packed)


def test_another_job_does_not_go_on_with_it(model, tmp_path, kvrail, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, "copy_files", stop)
        with pytest.raises(KeyboardInterrupt):
            kvrail("pack", model, tmp_path / "out")
    other = copy(model, tmp_path / "other")
    status, error = kvrail("pack", other, tmp_path / "out")
    assert status == 2 and "out.partial was begun by another run" in error
    with monkeypatch.context() as patch:
        patch.setattr(packing, "copy_files", stop)
        with pytest.raises(KeyboardInterrupt):
            kvrail("pack", model, tmp_path / "delta", "--base", other)
    shutil.rmtree(other)
    make_folder(other, tensors_of(seed=2))
    status, error = kvrail("pack", model, tmp_path / "delta", "--base", other)
    assert status == 2 and "delta.partial was begun by another run" in error
    with journal.work_on(tmp_path / "busy", {}):
        status, error = kvrail("pack", model, tmp_path / "busy")
        assert status == 2 and "another process is at work on" in error


def test_a_packed_file_of_a_later_version_is_named(packed, tmp_path, kvrail, monkeypatch):
    later = copy(packed, tmp_path / "later")
    path = later / "model-00001-of-00002.safetensors.packed"
    with PackedFile(path) as sound:
        body = bytes(sound.data[: sound.parts[-1].offset + sound.parts[-1].size])
        index = packed_file.write_index(sound.header, sound.parts, None)[:-32].replace(b'"version":1', b'"version":2')
    tail = struct.pack("<QQQ8s", len(body), len(index), packed_file.digest(index), packed_file.MAGIC)
    path.write_bytes(body + index + tail)
    status, error = kvrail("unpack", later, tmp_path / "out")
    assert status == 2 and "version 2" in error and "update it" in error
