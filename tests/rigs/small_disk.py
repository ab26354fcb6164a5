"""A disk of a few kilobytes: a tmpfs, in a mount namespace of its own, which only one process sees, or for all."""

import contextlib
import errno
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size="$1",mode=0700 none "$2" && shift 2 && exec "$@"'


@functools.cache
def _can_mount() -> bool:
    probe = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", "64k", "/tmp", "true"]
    try:
        return subprocess.run(probe, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def small_disk(disk: Path, size: str, *, num_files: int = 1000) -> Iterator[None]:
    """Mounts it at this folder, for every process. Skips where this user may not."""
    options = f"size={size},nr_inodes={num_files},mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this user may mount nothing here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


class FullDisk:
    """os.write onto a disk with `room` bytes left, or any number if None; onto a full one it raises the error."""

    def __init__(self, error: int = errno.ENOSPC) -> None:
        self.error = error
        self.room: int | None = None
        self.calls = 0

    def write(self, descriptor: int, data: bytes) -> int:
        """As os.write."""
        self.calls += 1
        if self.room is None:
            return os.write(descriptor, data)
        if not self.room:
            raise OSError(self.error, os.strerror(self.error))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


def fill(disk: Path) -> Path:
    """Leaves no room on a disk. Returns the file that has it all."""
    path = disk / "fill"
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return path


def argv_on_small_disk(disk: Path, size: str, argv: list[str]) -> list[str]:
    """Returns the command that runs `argv` with a tmpfs of this size at the folder `disk`. Skips where none can be."""
    if not _can_mount():
        pytest.skip("no tmpfs can be mounted here")
    return ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", size, str(disk), *argv]


def run_on_small_disk(disk: Path, size: str, code: str, **environment: str) -> list[str]:
    """Runs Python code, which has the disk as `sys.argv[1]`. Returns the lines that it printed."""
    argv = argv_on_small_disk(disk, size, [sys.executable, "-c", code, str(disk)])
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
