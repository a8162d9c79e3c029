"""Files that not everybody may read."""

import os
from pathlib import Path

from kvrail.errors import ConfigError


def write_whole(path: Path, content: bytes, mode: int) -> None:
    """Put a file in place as a whole, of this mode at most; owner and group stay, and what the group may do.

    Raises ConfigError where they cannot stay. Where it raises, the old file is there, and nothing else is.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():  # who reads it must be able to read the new one, whatever the umask
                old = path.stat()
                os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, old.st_mode & (mode | 0o060))
            file.write(content)
        scratch.replace(path)
    except PermissionError as error:
        raise ConfigError(f"{path}: {error.strerror}; run this as root or as the file's owner") from None
    finally:
        scratch.unlink(missing_ok=True)
