"""The folder in which programs keep what they can make again: compiled kernels, facts about models."""

import os
import stat
import tempfile
from pathlib import Path


def cache_dir(name: str) -> Path:
    """Returns the folder of this name in the user's cache: $XDG_CACHE_HOME/tandem/NAME, by default in ~/.cache.

    Without a home folder that can be written, it is in /tmp/tandem-cache-<uid>, or in a new folder if that is another
    user's. The folder may not exist yet.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "tandem" / name
    try:
        own = Path.home() / ".cache" / "tandem"
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(own, os.W_OK | os.X_OK):
            return own / name
    except (OSError, RuntimeError):
        pass  # There is no home folder, or it is not this user's.
    shared = Path(tempfile.gettempdir()) / f"tandem-cache-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        return (shared if is_private(shared) else Path(tempfile.mkdtemp(prefix="tandem-cache-"))) / name
    except OSError:
        return shared / name


def is_private(path: Path) -> bool:
    """Whether this is a file or folder that only this user can have written. Raises OSError if there is none."""
    found = path.lstat()
    is_known = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return is_known and found.st_uid == os.getuid() and not found.st_mode & 0o022
