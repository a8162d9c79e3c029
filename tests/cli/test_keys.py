"""`kvrail keys`: a file that people also edit by hand, and a router that reads it meanwhile."""

import errno
import os
import re
import threading

import pytest

from kvrail.cli import keys
from kvrail.cli.main import main
from kvrail.security.keyfile import KeyFile, hash_of

BY_HAND = b"""# the team's keys

[[keys]]
name = "carol"  # on holiday
sha256 = "%s"
models = [
    "[[keys]]",
]

# robots
 [[ keys ]]
name = "robot"
sha256 = "%s"
concurrent_requests = 2
""" % (b"a" * 64, b"b" * 64)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.toml"


def test_a_key_is_added_listed_and_revoked_under_a_running_router(file, capsys):
    assert main(["keys", "add", "alice", "--file", str(file), "--requests-per-minute", "60"]) == 0
    secret = capsys.readouterr().out.strip()
    assert main(["keys", "add", "bob", "--file", str(file), "--expires", "2020-01-01", "--models", "a,b"]) == 0
    capsys.readouterr()
    router = KeyFile(str(file))
    assert router.find(secret).name == "alice"

    assert main(["keys", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert re.findall(r"^(\w+) +(\S+) +(\S+) +(\S+) +(\S+) +(.*)$", listed, re.MULTILINE)[1:] == [
        ("alice", "60", "-", "-", "all", "never"),
        ("bob", "-", "-", "-", "a,b", "2020-01-01 00:00 UTC (expired)"),
    ]
    assert secret not in listed
    assert hash_of(secret) not in listed

    assert main(["keys", "revoke", "alice", "--file", str(file)]) == 0
    assert KeyFile(str(file)).find(secret) is None
    assert [key.name for key in KeyFile(str(file)).keys().values()] == ["bob"]


@pytest.mark.parametrize(("name", "left"), [("carol", "robot"), ("robot", "carol")])
def test_revoking_leaves_what_people_wrote(file, name, left):
    file.write_bytes(BY_HAND)
    file.chmod(0o640)
    assert main(["keys", "revoke", name, "--file", str(file)]) == 0
    assert [key.name for key in KeyFile(str(file)).keys().values()] == [left]
    assert file.read_bytes().startswith(b"# the team's keys\n")
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_table_that_cannot_be_cut_out_is_left(file, capsys):
    inline = b'keys = [{name = "a", sha256 = "%s"}, {name = "b", sha256 = "%s"}]\n' % (b"a" * 64, b"b" * 64)
    file.write_bytes(inline)
    assert main(["keys", "revoke", "a", "--file", str(file)]) == 2
    assert "delete it by hand" in capsys.readouterr().err
    assert file.read_bytes() == inline


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("list", "alice"), "keys list takes no NAME; drop NAME"),
        (("revoke",), "keys revoke takes a NAME"),
        (("add",), "keys add takes a NAME"),
        (("revoke", "nil"), "is called 'nil'; its keys: carol, robot"),
        (("list", "--expires", "2030-01-01"), "--expires is for a new key"),
        (("remove", "carol"), "invalid choice: 'remove'"),
    ],
)
def test_errors_say_what_to_do_and_change_nothing(file, capsys, arguments, message):
    file.write_bytes(BY_HAND)
    try:
        status = main(["keys", *arguments, "--file", str(file)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert file.read_bytes() == BY_HAND


@pytest.mark.parametrize("action", [("list",), ("revoke", "alice")])
def test_a_missing_file_is_named(file, capsys, action):
    assert main(["keys", *action, "--file", str(file)]) == 2
    assert f"--file {file}: No such file or directory; name the file that the router reads" in capsys.readouterr().err
    assert not file.exists()


def test_the_file_stays_with_whom_it_belongs_to(file, monkeypatch):
    """The router reads it as another user than who revokes."""
    file.write_bytes(BY_HAND)
    file.chmod(0o640)
    given, give = [], os.fchown
    monkeypatch.setattr(os, "fchown", lambda descriptor, *owner: given.append(owner) or give(descriptor, *owner))
    if os.geteuid() == 0:
        os.chown(file, 65534, 65533)
    before, mask = file.stat(), os.umask(0o077)
    try:
        assert main(["keys", "revoke", "carol", "--file", str(file)]) == 0
    finally:
        os.umask(mask)
    after = file.stat()
    assert given == [(after.st_uid, after.st_gid)] == [(before.st_uid, before.st_gid)]
    assert after.st_ino != before.st_ino and after.st_mode == before.st_mode


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        ("os.fchown", errno.EPERM, "Operation not permitted; run this as root or as the file's owner"),
        ("os.fchown", errno.EINVAL, "Invalid argument"),
        ("pathlib.Path.replace", errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_change_that_fails_changes_nothing_and_leaves_nothing(file, capsys, monkeypatch, step, error, message):
    def fail(*_):
        raise OSError(error, os.strerror(error))

    file.write_bytes(BY_HAND)
    monkeypatch.setattr(step, fail)
    assert main(["keys", "revoke", "carol", "--file", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert file.read_bytes() == BY_HAND
    assert list(file.parent.iterdir()) == [file]


def test_two_that_add_at_once_lose_no_key(file, monkeypatch):
    """The second begins when the first has read, and ends before it writes, unless it waits for it."""
    write, second = keys._write, threading.Thread(target=main, args=(["keys", "add", "second", "--file", str(file)],))

    def slow(*arguments):
        if second.ident is None:
            second.start()
            second.join(0.1)
        write(*arguments)

    monkeypatch.setattr(keys, "_write", slow)
    assert main(["keys", "add", "first", "--file", str(file)]) == 0
    second.join()
    assert [key.name for key in KeyFile(str(file)).keys().values()] == ["first", "second"]


def test_the_last_key_is_revoked_under_a_running_router(file, monkeypatch):
    """What is left is no empty file, which would be taken for an unfinished one."""
    monkeypatch.setattr("kvrail.runtime.watched.LOOK_EVERY_S", 0.0)
    assert main(["keys", "add", "alice", "--file", str(file)]) == 0
    router = KeyFile(str(file))
    assert router.keys()
    assert main(["keys", "revoke", "alice", "--file", str(file)]) == 0
    assert not router.keys()
