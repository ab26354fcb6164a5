"""Files that only this user can read. Owns nothing."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

MODE = 0o600


def create(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Creates a file of mode 0600 and opens it for writing. Raises FileExistsError if it exists, OSError."""
    return open(path, "xb", buffering=buffering, opener=private)


def put(path: Path, data: bytes, how: Callable[[Path, Path], None] = os.replace) -> None:
    """Writes a file of mode 0600 as a whole, or leaves what is there: no reader and no full disk sees a part.

    `how` puts it in place: `os.replace`, or `os.link`, which raises FileExistsError. Raises OSError.
    """
    draft = path.with_name(f".{path.name[:64]}-{secrets.token_hex(8)}")
    try:
        with create(draft) as file:
            file.write(data)
        how(draft, path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def private(path: str, flags: int) -> int:
    """An opener for `open`; a file that it creates has mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, MODE)
