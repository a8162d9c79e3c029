"""The lock file of the image for GPUs: `make lock` keeps it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKED = dict(
    re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "deploy" / "docker" / "requirements-cuda.txt").read_text(), re.M)
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = [*PROJECT["dependencies"], *EXTRAS["worker"], *EXTRAS["ucx"], *EXTRAS["otel"]]


@pytest.mark.parametrize("requirement", [Requirement(each.partition("#")[0]) for each in NEEDED], ids=str)
def test_what_the_package_needs_is_locked_in_a_version_that_it_accepts(requirement):
    assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier, "run make lock"


def test_torch_is_the_release_that_is_tested():
    assert f"torch=={LOCKED['torch']}" == (ROOT / "constraints-cpu.txt").read_text().strip()


def test_every_package_is_held_by_hashes():
    entries = re.split(r"\n(?=\S)", (ROOT / "deploy" / "docker" / "requirements-cuda.txt").read_text().strip())
    assert [each for each in entries if not each.startswith("#") and "--hash=sha256:" not in each] == []
