"""The folder of the sockets: made with mode 0700, owned by us, held by one scheduler at a time.

Owns the folder's lock. Other users of the machine can neither connect nor put a socket of their own there.
"""

import fcntl
import os
import stat
from pathlib import Path

# Linux keeps socket paths in 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = "frontend.sock"


class RuntimeDir:
    """Opened at start, held until the process ends. Raises SystemExit with the reason where it cannot be had."""

    def __init__(self, path: Path) -> None:
        path = path.absolute()
        if len(os.fsencode(path / _LONGEST_NAME)) > _MAX_SOCKET_PATH:
            raise SystemExit(
                f"scheduler_svc: runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has "
                f"{len(os.fsencode(path / _LONGEST_NAME))} bytes; the limit is {_MAX_SOCKET_PATH}"
            )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise SystemExit(f"scheduler_svc: runtime_dir {path} is no folder of this user's")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise SystemExit(
                f"scheduler_svc: runtime_dir {path} has mode {stat.S_IMODE(status.st_mode):04o}; it must be 0700, "
                "others could connect to the worker's socket"
            )
        self.path = path
        self._lock = os.open(path / "scheduler.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(
                f"scheduler_svc: another scheduler holds {path}; give this one a folder of its own (--runtime-dir)"
            ) from None

    @property
    def worker_endpoint(self) -> str:
        """Where workers connect."""
        return f"ipc://{self.path}/worker.sock"

    @property
    def frontend_endpoint(self) -> str:
        """Where front ends connect."""
        return f"ipc://{self.path}/frontend.sock"
