"""The files of `tandem chat`: saved conversations, and the history of what was typed.

Only their owner may read them.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
_PRIVATE = 0o600


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises ValueError if it is too large or not UTF-8; OSError."""
    with path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{path} is larger than {MAX_BYTES:,} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from None


def parse_conversation(text: str) -> Any:
    """Returns the value of a file that `save` wrote; None if the text is no such file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "messages" in value else None  # pyright: ignore


def save(path: Path, saved: Mapping[str, Any], *, overwrite: bool) -> None:
    """Writes a conversation. Raises FileExistsError unless it may overwrite; OSError."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if overwrite else os.O_EXCL)
    with os.fdopen(os.open(path, flags, _PRIVATE), "w", encoding="utf-8") as file:
        json.dump(saved, file, ensure_ascii=False, indent=1)
        file.write("\n")


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Makes the file of the history, by the XDG rules; None if it cannot be written."""
    base = environment.get("XDG_STATE_HOME") or ""
    with contextlib.suppress(OSError, RuntimeError):
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "tandem"
        path = folder / "chat_history"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, _PRIVATE)
        try:
            os.fchmod(handle, _PRIVATE)
        finally:
            os.close(handle)
        return path
    return None
