"""`kvrail keys`: a file that people also edit by hand, and a router that reads it meanwhile."""

import re

import pytest

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
