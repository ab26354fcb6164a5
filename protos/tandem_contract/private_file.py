"""Files that only this user can read. Owns nothing."""

import os
from pathlib import Path
from typing import BinaryIO

MODE = 0o600


def create(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Creates a file of mode 0600 and opens it for writing. Raises FileExistsError if it exists, OSError."""
    return open(path, "xb", buffering=buffering, opener=private)


def private(path: str, flags: int) -> int:
    """An opener for `open`; a file that it creates has mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, MODE)
