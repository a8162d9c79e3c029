"""The folders of codecs hold the files that kvrail/codec/README.md lists, and kernels where it says."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

CODEC = Path(__file__).parents[2] / "kvrail" / "codec"
OTHERS = {"core", "fused"}
"""What codecs share."""
WEIGHTS = {"compact", "tbe"}
"""Forms in a GPU's memory; others are turned into bytes by a codec."""
OWNERS = {"numba": "cpu", "triton": "gpu"}
FAMILIES, SHARED = ("papers", "splitzip"), "tiles"
"""Folders of codecs; SHARED is what the forms of splitzip have in common."""
FORMS = [each for family in FAMILIES for each in sorted((CODEC / family).iterdir()) if (each / "__init__.py").exists()]
FOLDERS = [
    *(
        each
        for each in sorted(CODEC.iterdir())
        if (each / "__init__.py").exists() and each.name not in OTHERS | {*FAMILIES}
    ),
    *FORMS,
]


def listed():
    """Patterns of names in the first column of README.md's table of files."""
    section = (CODEC / "README.md").read_text().split("## What a codec's folder holds")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def strangers(names):
    """Names that no pattern has."""
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in [*listed(), "__init__.py"])]


def misplaced(name, source):
    """What a module imports, or defines, and by its name may not."""
    device = name.split("_")[0].removesuffix(".py")
    kernels = bool(re.search(r"_?kernels?\.py$", name))
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            roots = [alias.name.split(".")[0] for alias in node.names]
            roots = roots if isinstance(node, ast.Import) else [(node.module or "").split(".")[0]]
            found += [root for root, owner in OWNERS.items() if root in roots and device != owner]
        elif isinstance(node, ast.FunctionDef) and not kernels:
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            found += [node.name for mark in marks if mark.startswith(("triton.jit", "njit", "compiled"))]
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(CODEC)))
def test_a_codec_has_the_files_of_the_plan(folder):
    names = {each.name for each in folder.iterdir()} - {"__pycache__"}
    assert strangers(sorted(names)) == []
    if folder.name != SHARED:
        assert {"README.md", "format.py" if folder.name in WEIGHTS else "codec.py"} <= names
    for name in sorted(name for name in names if name.endswith(".py")):
        assert misplaced(name, (folder / name).read_text()) == [], name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_forms_and_a_readme(family):
    forms = {form.name for form in FORMS if form.parent.name == family}
    assert {each.name for each in (CODEC / family).iterdir()} - {"__pycache__"} == {"README.md", "__init__.py", *forms}


def test_the_plan_can_be_broken():
    assert "codec.py" in listed()
    assert strangers(["codec.py", "cpu_kernels.py", "formats.py", "kernels.py"]) == ["formats.py", "kernels.py"]
    assert misplaced("gpu_launch.py", "import triton\n@triton.jit\ndef f(): pass") == ["f"]
    assert misplaced("plan.py", "from numba import njit\nimport triton.language as tl") == ["numba", "triton"]
    assert misplaced("cpu_kernels.py", "from numba import njit\n@njit\ndef f(): pass") == []
