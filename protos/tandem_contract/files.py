"""Files and folders in which several programs meet: the cache, the runtime folder with its key, and CURVE keys.

The cache has what programs can make again: compiled kernels, facts about models. The runtime folder, which scheduler
and workers of a machine share, has their sockets and `worker.key`, with which workers prove that they belong to it: it
protects against a process that joins by mistake, not against another program of the same user; other users can neither
connect to a socket of the folder nor create one in it. CURVE keys are those of workers on other hosts: a file has one,
40 characters (Z85) in one line. `tandem keys` makes them, everything else reads them. A key never appears in a message
or in a log, except for public ones.
"""

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tandem_contract import private_file

SOCKETS = WORKER_SOCKET, FRONTEND_SOCKET = "worker.sock", "frontend.sock"
KEY_NAME, KEY_BYTES = "worker.key", 32
# Linux keeps socket paths in 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = max(SOCKETS, key=len)
# Attempts to read a file that another program has created and not written yet.
_KEY_TRIES, _KEY_PAUSE_SECONDS = 50, 0.02
SCHEDULER_SECRET, SCHEDULER_PUBLIC, WORKER_SECRET = "scheduler.secret", "scheduler.public", "worker.secret"
# Milliseconds. Each end asks the other for a sign of life; one whose cable is pulled is given up after 500 + 2,000.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HANDSHAKE_MS = 500, 2000, 3000
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY_CHARACTERS, _GROUP, _MAX_FILE_BYTES = 40, 5, 4096
# The locks of all processes.
_LOCKS = Path("/proc/locks")
_FORMAT = f"it must have one key: {_KEY_CHARACTERS} characters, Z85"


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


def lock_file(descriptor: int) -> None:
    """Locks an open file for this process. Raises Locked if another has it; OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked(_lock_holder(os.fstat(descriptor))) from None


class Locked(Exception):
    """Another process has locked the file. The message says which one, in parentheses; empty if that is not known."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f" (process {pid})" if pid else "")


def _lock_holder(status: os.stat_result) -> int | None:
    """The process with the file's lock, as Linux lists it; None elsewhere, and for one of another container."""
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    found: dict[str, int] = {}
    for line in lines:
        # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[4].isdecimal():
            found[words[5]] = int(words[4])
    whole = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # Some file systems have another number there than stat says; then one file of that number is enough.
    same = [name for name in found if name.rpartition(":")[2] == str(status.st_ino)]
    return found.get(whole) or (found[same[0]] if len(same) == 1 else None)


def is_private(path: Path) -> bool:
    """Whether this is a file or folder that only this user can have written. Raises OSError if there is none."""
    found = path.lstat()
    is_known = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return is_known and found.st_uid == os.getuid() and not found.st_mode & 0o022


def default_runtime_dir() -> Path:
    """Returns the default folder: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


def own_runtime_dir(path: Path) -> None:
    """Creates the folder, or checks that only this user has access: its owner can act as the scheduler.

    Raises ValueError or OSError.
    """
    num_bytes = len(os.fsencode(path.absolute() / _LONGEST_NAME))
    if num_bytes > _MAX_SOCKET_PATH:
        raise ValueError(
            f"runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has {num_bytes} bytes; the limit "
            f"is {_MAX_SOCKET_PATH}"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"runtime_dir {path} is not a folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"runtime_dir {path} is a link; it must be a folder")
    if found.st_uid != os.getuid():
        raise ValueError(f"runtime_dir {path} belongs to user {found.st_uid}; it must belong to {os.getuid()}")
    if found.st_mode & 0o077:
        raise ValueError(
            f"runtime_dir {path} has mode {stat.S_IMODE(found.st_mode):04o}; it must be 0700, because others could "
            "connect to the worker's socket"
        )


def endpoint_of(folder: Path, socket: str) -> str:
    """Returns the ZeroMQ endpoint of one of the sockets."""
    return f"ipc://{folder.absolute()}/{socket}"


class KeyFile:
    """`worker.key` of a runtime folder, 32 random bytes; the first of scheduler and worker to start creates it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / KEY_NAME
        self._last = b""

    def read(self) -> bytes:
        """The key. Raises ValueError if others could have written the file, OSError if it cannot be read."""
        for _ in range(_KEY_TRIES):
            try:
                key = self._read()
            except FileNotFoundError:
                # Another program may be faster.
                with contextlib.suppress(FileExistsError):
                    self._write(secrets.token_bytes(KEY_BYTES), os.link)
                continue
            if len(key) == KEY_BYTES:
                self._last = key
                return key
            time.sleep(_KEY_PAUSE_SECONDS)
        raise ValueError(
            f"{self.path} does not have a key of {KEY_BYTES} bytes; remove it, then start the scheduler and its "
            "workers again"
        )

    def has_changed(self) -> bool:
        """Whether the file differs from the last read: a scheduler may have created the folder again."""
        try:
            return self._read() != self._last
        except (OSError, ValueError):
            return True

    def restore(self) -> None:
        """Writes the key that was read unless the file has it: workers read the file again when theirs is refused.

        Raises OSError.
        """
        if self.has_changed():
            self._write(self._last, os.replace)

    def _read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            mode = stat.S_IMODE(found.st_mode)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
                raise ValueError(
                    f"{self.path} must be a file of user {os.getuid()} with mode 0600; it belongs to user "
                    f"{found.st_uid} and has mode {mode:04o}"
                )
            return file.read(KEY_BYTES + 1)

    def _write(self, key: bytes, put: Callable[[Path, Path], None]) -> None:
        """Writes the key under another name and puts it in place, so that a reader never reads a part of it."""
        draft = self.path.with_name(f".{KEY_NAME}-{secrets.token_hex(8)}")
        try:
            with private_file.create(draft) as file:
                file.write(key)
            put(draft, self.path)
        finally:
            draft.unlink(missing_ok=True)


class KeyFileError(Exception):
    """A file or folder is of no use. The message has its path and what is wrong, never its content."""


def read_key(path: Path, *, is_secret: bool) -> bytes:
    """Returns the key in the file, Z85. Raises KeyFileError if there is none, or others could have written it.

    is_secret: others must not be able to read it either.
    """
    try:
        # Without O_NONBLOCK the open of a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path} is not a file; {_FORMAT}")
            check_owner(path, status, 0o077 if is_secret else 0o022)
            key = file.read(_MAX_FILE_BYTES).strip()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error.strerror}") from None
    if not _is_key(key):
        raise KeyFileError(f"{path} has no key; {_FORMAT}")
    return key


def check_owner(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raises KeyFileError unless this user or root owns the file or folder and it has none of the forbidden bits."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.getuid(), 0) or mode & forbidden:
        raise KeyFileError(
            f"{path} belongs to user {status.st_uid} and has mode {mode:04o}; it must belong to user {os.getuid()} and "
            f"have mode {mode & ~forbidden:04o}"
        )


def _is_key(text: bytes) -> bool:
    """Whether this is Z85 (ZeroMQ's RFC 32) of 32 bytes: each five characters are a number below 2^32."""
    if len(text) != _KEY_CHARACTERS or not set(text) <= set(_Z85):
        return False
    groups = (text[start : start + _GROUP] for start in range(0, _KEY_CHARACTERS, _GROUP))
    return all(sum(_Z85.index(each) * 85**i for i, each in enumerate(reversed(group))) < 1 << 32 for group in groups)
