"""Files stay within 400 lines and functions within 60 (Triton kernels 120), so that each can be read at once.

A function's docstring does not count: shapes and units are welcome.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 60, 120
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "kvrail").rglob("*.py") if "wire/v1" not in path.as_posix())


def too_long(source):
    """Names of the functions in `source` that are too long, and the file itself as <file>."""
    found = ["<file>"] if len(source.splitlines()) > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1 + node.body[0].lineno - node.lineno
            kernel = any(ast.unparse(each).startswith("triton.") for each in node.decorator_list)
            if length > (KERNEL_LINES if kernel else FUNCTION_LINES):
                found.append(node.name)
    return found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_nothing_is_too_long(path):
    assert too_long((ROOT / path).read_text(encoding="utf-8")) == []


def test_the_rule_can_be_broken():
    body = "    pass\n" * 60
    assert too_long(f"def f():\n{body}") == ["f"]
    assert too_long(f'def f():\n    """{body}"""\n    pass') == []
    assert too_long(f"@triton.jit\ndef f():\n{body}") == []
    assert too_long(f"@triton.jit\ndef f():\n{body}{body}") == ["f"]
    assert too_long("\n" * 401) == ["<file>"]
