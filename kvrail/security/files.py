"""Files that not everybody may read."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Put a file in place as a whole, at no moment readable by more than `mode` says."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    scratch.replace(path)
