"""The lock files of the images for GPUs: `make lock` keeps that of the first."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS = {name: (ROOT / "deploy" / "docker" / f"requirements-{name}.txt").read_text() for name in ("cuda", "rdma")}
LOCKED = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", LISTS["cuda"], re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDED = [*PROJECT["dependencies"], *EXTRAS["worker"], *EXTRAS["ucx"], *EXTRAS["otel"]]


@pytest.mark.parametrize("requirement", [Requirement(each.partition("#")[0]) for each in NEEDED], ids=str)
def test_what_the_package_needs_is_locked_in_a_version_that_it_accepts(requirement):
    assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier, "run make lock"


def test_torch_is_the_release_that_is_tested():
    assert f"torch=={LOCKED['torch']}" == (ROOT / "constraints-cpu.txt").read_text().strip()


@pytest.mark.parametrize("name", LISTS)
def test_every_package_is_held_by_hashes(name):
    entries = re.split(r"\n(?=\S)", LISTS[name].strip())
    assert [each for each in entries if not each.startswith("#") and "--hash=sha256:" not in each] == []
