"""Accepted drafts that a benchmark imposes: where it takes them from."""

import json

import pytest

from benchmarks.acceptance import impose, quantiles

CODECS = ["raw", "splitzip-progressive-ans", "lynx-exact"]


def test_quantiles_stand_for_equal_shares():
    assert quantiles([9, 0, 5], 3) == [0, 5, 9]
    assert quantiles(range(100), 2) == [25, 75]
    assert quantiles(range(22), 3) == [3, 11, 18]
    assert quantiles([4, 2], 4) == [2, 2, 4, 4]


def test_counts_are_for_every_codec_that_drafts():
    imposed = impose("0,64,32", CODECS, 3)
    assert imposed.accepted == {"splitzip-progressive-ans": [0, 32, 64], "lynx-exact": [0, 32, 64]}
    assert [imposed.count("lynx-exact", number) for number in range(3)] == [0, 32, 64]
    assert imposed.count("raw", 2) == 0
    assert "imposed, not measured" in imposed.notes()


def test_a_measurement_has_counts_of_each_codec(tmp_path):
    path = tmp_path / "progressive-drafts.json"
    path.write_text(json.dumps({"accepted": {"splitzip-progressive-ans": [3, 1, 2], "lynx-exact": [64], "lynx": [5]}}))
    imposed = impose(str(path), CODECS, 1)
    assert imposed.accepted == {"splitzip-progressive-ans": [2], "lynx-exact": [64]}
    assert path.name in imposed.notes()


@pytest.mark.parametrize(
    ("content", "codecs", "named"),
    [
        ('{"accepted": {"lynx": [1]}}', CODECS, "splitzip-progressive-ans"),
        ('{"accepted": {"splitzip-progressive-ans": []}}', CODECS[:2], "splitzip-progressive-ans"),
        ('{"accepted": {"splitzip-progressive-ans": ["x"]}}', CODECS[:2], "'x'"),
        ('{"tables": []}', CODECS, "'accepted'"),
        ('{"accepted": [1]}', CODECS, "no counts"),
        ("[1]", CODECS, "no counts"),
        ("", CODECS, "no counts"),
        ('{"accepted": {}}', ["raw", "auto"], "auto"),
    ],
)
def test_what_is_no_measurement_is_named(tmp_path, content, codecs, named):
    path = tmp_path / "found.json"
    path.write_text(content)
    with pytest.raises(SystemExit, match="--acceptance") as error:
        impose(str(path), codecs, 3)
    assert named in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(SystemExit, match=r"--acceptance nowhere\.json"):
        impose("nowhere.json", CODECS, 3)
