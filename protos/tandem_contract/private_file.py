"""Creates files that only this user can read. Owns nothing."""

import os
from pathlib import Path
from typing import BinaryIO


def create(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Creates a file of mode 0600 and opens it for writing. Raises FileExistsError if it exists, OSError."""
    return open(path, "xb", buffering=buffering, opener=_private)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
