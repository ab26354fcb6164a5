"""Creates files that only this user may read. Owns nothing."""

import os
from pathlib import Path
from typing import BinaryIO


def create(path: Path, *, buffering: int = -1) -> BinaryIO:
    """A new file of mode 0600, open for writing. Raises OSError, FileExistsError where the file exists."""
    return open(path, "xb", buffering=buffering, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
