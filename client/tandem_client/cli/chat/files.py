"""The files of `tandem chat`: saved conversations, and the history of what was typed.

Only their owner may read them.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem_contract.private_file import MODE, private, put

MAX_BYTES = 16 * 2**20


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
    """Writes a conversation as a whole or not at all. Raises FileExistsError unless it may overwrite; OSError."""
    text = json.dumps(saved, ensure_ascii=False, indent=1) + "\n"
    put(path.resolve(), text.encode(), os.replace if overwrite else os.link)


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Makes the file of the history, by the XDG rules; None if it cannot be written."""
    base = environment.get("XDG_STATE_HOME") or ""
    with contextlib.suppress(OSError, RuntimeError):
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "tandem"
        path = folder / "chat_history"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(path, "ab", opener=lambda name, flags: private(name, flags | os.O_NOFOLLOW)) as file:
            os.fchmod(file.fileno(), MODE)
        return path
    return None
