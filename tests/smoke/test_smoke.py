"""Parts of `make gpu-smoke` that need no GPU: of which code a result is, what is asked, what counts as different."""

import copy
import subprocess

import pytest

from tests.smoke.cases import CASES
from tests.smoke.client import Answer, difference
from tests.smoke.mix import KINDS, crowd
from tests.smoke.state import ROOMS, ROOT, tree_id


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_tree_ids_are_those_of_git(tmp_path):
    inner = tmp_path / "room" / "inner"
    inner.mkdir(parents=True)
    for name, content in (("room/a.py", "a"), ("room/inner.py", ""), ("room/inner/b.cu", "\0\n"), ("room/run", "#!")):
        (tmp_path / name).write_text(content)
    (tmp_path / "room" / "run").chmod(0o755)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    (inner / "__pycache__").mkdir()
    (inner / "__pycache__" / "b.pyc").write_text("")
    (tmp_path / "room" / "empty").mkdir()
    assert tree_id(tmp_path / "room") == git(tmp_path, "rev-parse", "HEAD:room").strip()


def test_the_rooms_are_there():
    assert all((ROOT / room / "__init__.py").exists() for room in ROOMS)


def test_a_crowd_is_the_same_each_time_and_has_every_kind():
    asked = list(crowd(60))
    assert asked == list(crowd(60))
    assert {each.kind for each in asked} == KINDS.keys()
    assert {5, 3000} <= {len(each.body["prompt"]) for each in asked}
    assert any(each.leaves for each in asked)


def test_cases_have_names_of_their_own_and_enough_architectures():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({case.architecture for case in CASES}) >= 12


@pytest.mark.parametrize(
    ("place", "value"),
    [("token_ids", [1, 3]), ("text", "ac"), ("finish_reason", "length"), ("token_logprobs", [-0.5, -1.6])],
)
def test_whatever_differs_is_told(place, value):
    piece = {
        "index": 0,
        "token_ids": [1, 2],
        "text": "ab",
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5, -1.5]},
    }
    other = copy.deepcopy(piece)
    (other["logprobs"] if place == "token_logprobs" else other)[place] = value
    answers = []
    for each in (piece, other):
        answers.append(Answer())
        answers[-1].add({"choices": [each]})
    assert difference(answers[0], copy.deepcopy(answers[0])) is None
    assert difference(*answers) is not None
