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
import functools
import logging
import os
import pwd
import secrets
import stat
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path

from tandem_contract import private_file

log = logging.getLogger("tandem")

# The free bytes of a cache's folder; one with less is as good as full.
_LEAST_ROOM = 1 << 16
SOCKETS = WORKER_SOCKET, FRONTEND_SOCKET = "worker.sock", "frontend.sock"
KEY_NAME, KEY_BYTES = "worker.key", 32
# Linux keeps socket paths in 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107
_LONGEST_NAME = max(SOCKETS, key=len)
# Attempts to read a file that another program has created and not written yet.
_KEY_TRIES, _KEY_PAUSE_SECONDS = 50, 0.02
SCHEDULER_SECRET, SCHEDULER_PUBLIC, WORKER_SECRET = "scheduler.secret", "scheduler.public", "worker.secret"
# Milliseconds. Each end asks the other for a sign of life; one with a pulled cable is given up after 500 + 2,000.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, HANDSHAKE_MS = 500, 2000, 3000
_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KEY_CHARACTERS, _GROUP, _MAX_FILE_BYTES = 40, 5, 4096
# The locks of all processes.
_LOCKS = Path("/proc/locks")
FileState = list[tuple[int, int, int, int]]
_FORMAT = f"it must have one key: {_KEY_CHARACTERS} characters, Z85"


def cache_dir(name: str) -> Path:
    """Returns the folder of this name in the user's cache: $XDG_CACHE_HOME/tandem/NAME, by default in ~/.cache.

    Where nothing can be written there, it is in a private folder among the machine's temporary ones, which a warning
    says once. The folder may not exist yet.
    """
    return _cache_home(os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME"))[0] / name


def use_caches(environ: MutableMapping[str, str]) -> None:
    """Lets libraries that compile or download keep it in `cache_dir`, unless the user has named a folder.

    By themselves they use the home folder. Without one that can be written they would end the program, write into the
    working directory, or keep nothing.
    """
    if not environ.get("HOME"):
        # An empty one would be the root folder for them.
        environ.pop("HOME", None)
    kernels = environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir("inductor")))
    # Where Inductor would keep those that it writes for Triton.
    environ.setdefault("TRITON_CACHE_DIR", os.path.join(kernels, "triton"))
    ours, wanted = _cache_home(environ.get("XDG_CACHE_HOME", ""), environ.get("HOME"))
    if wanted == ours.parent:
        return
    environ.setdefault("CUDA_CACHE_PATH", str(ours / "cuda"))
    # Models may be there for reading alone.
    if wanted is None or not os.path.isdir(wanted / "huggingface"):
        environ.setdefault("HF_HOME", str(ours / "huggingface"))


@functools.cache
def _cache_home(named: str, home: str | None) -> tuple[Path, Path | None]:
    """Returns our folder of the cache, and the one that the user wants for all programs' caches; None without one.

    The arguments are XDG_CACHE_HOME, which must be absolute to count, and HOME.
    """
    wanted, problem = (Path(named), "") if os.path.isabs(named) else _home_cache(home)
    if wanted is not None:
        ours = wanted / "tandem"
        if not (problem := _make_private(ours)):
            return ours, wanted
        problem = f"{ours} {problem}"
    for parent in (_temporary_folder(), "/dev/shm"):
        ours = Path(parent) / f"tandem-cache-{os.getuid()}"
        if _make_private(ours):
            # Another user has made that one, or nothing can be written here.
            try:
                ours = Path(tempfile.mkdtemp(prefix="tandem-cache-", dir=parent))
            except OSError:
                continue
            if _make_private(ours):
                ours.rmdir()
                continue
        log.warning(
            "%s; caches of kernels and models are in %s, which may not last; set XDG_CACHE_HOME to a folder that "
            "this user can write",
            *(problem, ours),
        )
        return ours, wanted
    # The program that writes there says what is wrong.
    ours = Path(_temporary_folder()) / f"tandem-cache-{os.getuid()}" if wanted is None else wanted / "tandem"
    log.error(
        "%s, and no temporary folder can be written; set XDG_CACHE_HOME to a folder that this user can write", problem
    )
    return ours, wanted


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        # None of them can be written.
        return "/tmp"


def _home_cache(home: str | None) -> tuple[Path | None, str]:
    """Returns ~/.cache of a home that is this user's or root's, or why it is not used; another's gets no files.

    An empty HOME is as none: then it is the home folder that the system has for the user.
    """
    try:
        path = Path(home or pwd.getpwuid(os.getuid()).pw_dir)
        if not path.is_absolute():
            return None, f"HOME is {home}, which is not an absolute path"
        if (owner := path.stat().st_uid) not in (os.getuid(), 0):
            return None, f"the home folder {path} belongs to user {owner}"
        return path / ".cache", ""
    except OSError as error:
        return None, f"the home folder {error.filename} cannot be used: {error.strerror}"
    except KeyError:
        return None, f"HOME is not set, and user {os.getuid()} has no home folder"


def _make_private(folder: Path) -> str:
    """Creates the folder and writes a little in it. Returns what is wrong; empty if it can be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            return "is not a folder that only this user can write"
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if (file.write(bytes(_LEAST_ROOM)) or 0) < _LEAST_ROOM:
                return "has no room left"
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return ""


def lock_file(descriptor: int) -> None:
    """Locks an open file for this process. Raises Locked if another has it; OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _lock_holder(os.fstat(descriptor))
        raise Locked(f" (process {holder})" if holder else "") from None


class Locked(Exception):
    """Another process has locked the file. The message says which one, in parentheses; empty if that is not known."""


def _lock_holder(status: os.stat_result) -> int | None:
    """The process with the file's lock, as Linux lists it; None elsewhere, and for one of another container."""
    try:
        lines = _LOCKS.read_text("ascii").splitlines()
    except (OSError, ValueError):
        return None
    holders: dict[str, int] = {}
    for line in lines:
        # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
        words = line.split()
        if len(words) > 5 and words[1] == "FLOCK" and words[4].isdecimal():
            holders[words[5]] = int(words[4])
    whole = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    # Some file systems have another number there than stat says; then one file of that number is enough.
    same = [name for name in holders if name.rpartition(":")[2] == str(status.st_ino)]
    return holders.get(whole) or (holders[same[0]] if len(same) == 1 else None)


def is_private(path: Path) -> bool:
    """Whether this is a file or folder that only this user can have written. Raises OSError if it is missing."""
    status = path.lstat()
    is_known = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_known and status.st_uid == os.getuid() and not status.st_mode & 0o022


def default_runtime_dir() -> Path:
    """Returns the default folder: $XDG_RUNTIME_DIR/tandem, else /tmp/tandem-<uid>."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "tandem" if base else Path(f"/tmp/tandem-{os.getuid()}")


def own_runtime_dir(path: Path) -> None:
    """Creates the folder, or checks that only this user has access: its owner can act as the scheduler.

    Raises ValueError or OSError.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ValueError(f"runtime_dir {path} is not UTF-8, and addresses of sockets must be") from None
    num_bytes = len(os.fsencode(path.absolute() / _LONGEST_NAME))
    if num_bytes > _MAX_SOCKET_PATH:
        raise ValueError(
            f"runtime_dir {path} is too long for a socket: with /{_LONGEST_NAME} it has {num_bytes} bytes; the limit "
            f"is {_MAX_SOCKET_PATH}"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"runtime_dir {path} is not a folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ValueError(f"runtime_dir {path} is a link; it must be a folder")
    if status.st_uid != os.getuid():
        raise ValueError(f"runtime_dir {path} belongs to user {status.st_uid}; it must belong to {os.getuid()}")
    if status.st_mode & 0o077:
        raise ValueError(
            f"runtime_dir {path} has mode {stat.S_IMODE(status.st_mode):04o}; it must be 0700, because others could "
            "connect to the worker's socket"
        )


def check_socket_name(path: Path) -> None:
    """Raises ValueError if the path has something else than a socket, which a listener would remove or fail at."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISSOCK(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
    what = kinds.get(stat.S_IFMT(mode), "something else")
    raise ValueError(f"{path} is {what} and must be a socket: remove it, or choose another runtime_dir")


def endpoint_of(folder: Path, socket: str) -> str:
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
                    private_file.put(self.path, secrets.token_bytes(KEY_BYTES), os.link)
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
            private_file.put(self.path, self._last)

    def _read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or mode & 0o077:
                raise ValueError(
                    f"{self.path} must be a file of user {os.getuid()} with mode 0600; it belongs to user "
                    f"{status.st_uid} and has mode {mode:04o}"
                )
            return file.read(KEY_BYTES + 1)


def state_of(*files: Path | os.DirEntry[str]) -> FileState | None:
    """What shows that one of the files has changed; None if one cannot be found."""
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return None
    # The last one changes also with the owner and the mode, so that a file is read which has become readable.
    return [(one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats]


class KeyFileError(Exception):
    """A file or folder is of no use. The message has its path and what is wrong, never its content."""


class UnreadKeyError(KeyFileError):
    """The file is there and cannot be read, so nobody knows whether it has a key."""


def read_key(path: Path, *, is_secret: bool) -> bytes:
    """Returns the key in the file, Z85. Raises KeyFileError if it is missing, or others could have written it.

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
        kind = KeyFileError if isinstance(error, FileNotFoundError) else UnreadKeyError
        raise kind(f"{path} cannot be read: {error.strerror}") from None
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
    return all(sum(_Z85.index(char) * 85**i for i, char in enumerate(reversed(group))) < 1 << 32 for group in groups)
