"""What a process raises of its limits, in a process of its own."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
from kvrail.runtime.limits import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
allow_files(int(sys.argv[1]))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("wanted", "soft"), [(32, 64), (128, 128), (1 << 40, 200)])
def test_open_files_are_raised_as_far_as_is_permitted(wanted, soft):
    done = subprocess.run([sys.executable, "-c", CODE, str(wanted)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(soft), "200"]
