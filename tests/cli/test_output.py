"""Where `kvrail up` writes."""

import os

import pytest

from kvrail.cli.cluster.output import Output


def test_a_full_disk_takes_lines_and_not_the_cluster(tmp_path):
    room = tmp_path / "room"
    with open("/dev/full", "w") as stream:
        output = Output(stream, prefix=True)
        for number in range(3):
            output.line("router", f"lost {number}")
        with room.open("w") as other:
            os.dup2(other.fileno(), stream.fileno())  # there is room again
        output.line("router", "written")
        output.line("router", "and more")
    lines = room.read_text().splitlines()
    assert lines[-3:] == [
        "the output took no lines for a while; up to 3 are missing here",
        "router    | written",
        "router    | and more",
    ]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_the_terminal_lacks_are_written_as_codes(tmp_path, encoding):
    with (tmp_path / "log").open("w", encoding=encoding) as stream:
        output = Output(stream, prefix=True)
        output.line("router", "caf\u00e9 \u2014")
        output.say("the next line")
    shown = {"ascii": r"caf\xe9 \u2014", "latin-1": "caf\u00e9 \\u2014", "utf-8": "caf\u00e9 \u2014"}[encoding]
    assert (tmp_path / "log").read_text(encoding) == f"router    | {shown}\nthe next line\n"


def test_nobody_reads_any_more(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    with pytest.raises(BrokenPipeError):
        Output(stream, prefix=True).say("x")
    with pytest.raises(BrokenPipeError):
        stream.close()
