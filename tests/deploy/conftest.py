import os
import shutil
import subprocess

import pytest


@pytest.fixture(scope="session")
def promtool():
    """Runs promtool; where there is none the test is skipped, but fails in CI."""
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is not installed; set PROMTOOL to where it is")
        pytest.skip("promtool is not installed")

    def run(*arguments, stdin=None):
        return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True)

    return run
