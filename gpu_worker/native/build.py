"""Builds the C++ kernels of a CPU at the first start, and keeps the library in the user's cache folder.

Owns the choice of the instruction set, the compiler's flags and the cache. A library is found again by its sources,
flags, compiler and CPU, so a folder that several machines share serves all of them. Imports no torch.
"""

import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from gpu_worker.process.machine import text_of
from tandem_contract.files import Locked, cache_dir, is_private, lock_file

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_SECONDS = 300
_FULL = os.strerror(errno.ENOSPC)
# Between two lines of the log while the compiler runs.
_SAY_SECONDS = 5.0
# Between two looks at another process's build.
_LOOK_SECONDS = 0.1
# Sums may be contracted to fused multiply-adds, but not reordered: a token's bits must not depend on its batch.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi")


class NotBuilt(Exception):
    """The kernels cannot be built on this machine; the message says why and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """A set of vector instructions that kernels are compiled for."""

    name: str
    # As /proc/cpuinfo names them; all of them are needed.
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


def _instruction_set(name: str, flags: Iterable[str]) -> InstructionSet:
    compiler_flags = tuple(f"-m{flag.replace('_', '')}" for flag in flags)
    return InstructionSet(name=name, cpu_flags=frozenset(flags), compiler_flags=compiler_flags)


# Best first.
INSTRUCTION_SETS = (
    _instruction_set("avx512_bf16", (*_AVX2, *_AVX512, "avx512_bf16")),
    _instruction_set("avx512", (*_AVX2, *_AVX512)),
    _instruction_set("avx2", _AVX2),
)


def cpu_flags() -> frozenset[str]:
    """The features of this machine's CPU; empty where /proc/cpuinfo does not list them."""
    return frozenset(_cpu_info("flags").split())


def best_instruction_set(flags: frozenset[str]) -> InstructionSet:
    """The best set that a CPU with these features has. Raises NotBuilt."""
    best = next((candidate for candidate in INSTRUCTION_SETS if candidate.cpu_flags <= flags), None)
    if best is None:
        raise NotBuilt(f"the CPU ({platform.machine()}) has no AVX2 with FMA")
    return best


def build_ahead() -> None:
    """Builds this machine's library on a thread, if it is missing, while the caller imports torch.

    Errors are left to `built_library`, which waits for the thread.
    """

    def build() -> None:
        with suppress(NotBuilt):
            built_library(best_instruction_set(cpu_flags()))

    Thread(target=build, name="build ahead", daemon=True).start()


def built_library(instructions: InstructionSet, folder: Path | None = None) -> Path:
    """The library for these instructions, compiled if `folder` (default: the user's cache) does not contain it.

    Raises NotBuilt.
    """
    compiler = _compiler()
    command = [*compiler, *_FLAGS, *instructions.compiler_flags]
    folder = cache_dir("native") if folder is None else folder
    path = folder / f"kernels-{instructions.name}-{_key(command)}.so"
    try:
        _own(folder)
        if not _is_built(path):
            with _turn(folder):
                if not _is_built(path):
                    _compile(command, path)
    except OSError as error:
        raise NotBuilt(f"{folder} cannot hold the kernels: {error.strerror or error}; set XDG_CACHE_HOME") from error
    return path


def _is_built(path: Path) -> bool:
    return path.is_file() and is_private(path)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Waits while a thread or a process builds in this folder: its library is found instead of being built again.

    A file system without locks, or a builder that stands still, lets several build at once; each file is whole.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        begun = said = time.monotonic()
        while (now := time.monotonic()) - begun < _COMPILE_SECONDS:
            try:
                lock_file(descriptor)
                break
            except Locked as holder:
                if now - said >= _SAY_SECONDS:
                    log.info("another process%s builds the C++ kernels: waiting for %.0f s so far", holder, now - begun)
                    said = now
                time.sleep(_LOOK_SECONDS)
            except OSError as error:
                log.info("%s takes no lock (%s): processes build beside each other", folder, error.strerror)
                break
        yield
    finally:
        os.close(descriptor)


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    for command in [named] if named else [[name] for name in _COMPILERS]:
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    if named:
        raise NotBuilt(f"the compiler {named[0]} of CXX is not found")
    raise NotBuilt("there is no C++ compiler; install g++ (Debian: apt install g++), or name one in CXX")


def _key(command: list[str]) -> str:
    """A hash of all that the library depends on. The compiler counts by path, size and time, which takes no process."""
    digest = hashlib.sha256()
    compiler = Path(command[0]).resolve()
    about = compiler.stat()
    facts = [*command, str(compiler), str(about.st_size), str(about.st_mtime_ns), _cpu_info("model name")]
    # kernels.cpp includes all others.
    sources = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    for part in [fact.encode() for fact in facts] + [path.read_bytes() for path in sources]:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _compile(command: list[str], path: Path) -> None:
    """Writes the library under another name first, so that no process loads an incomplete one."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".kernels-", suffix=".so")
    os.close(fd)
    try:
        status, errors = _run([*command, str(_SOURCES / "kernels.cpp"), "-o", name])
        if status:
            # The linker's own words for a full disk have no "error".
            lines = [line.strip() for line in errors.splitlines() if "error" in line or _FULL in line]
            room = f"; there is no room in {path.parent} or {tempfile.gettempdir()}" if _FULL in errors else ""
            raise NotBuilt(f"{command[0]} failed: {(lines or ['no message'])[0][:300]}{room}")
        Path(name).chmod(0o700)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str]) -> tuple[int, str]:
    """The status and the errors of a compiler, which the log follows. Raises NotBuilt where it takes too long."""
    log.info("compiling the C++ kernels with %s: one file, once for this machine, some 10 to 30 s", command[0])
    begun = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as compiler:
        while (took := time.monotonic() - begun) < _COMPILE_SECONDS:
            try:
                _, errors = compiler.communicate(timeout=_SAY_SECONDS)
                return compiler.returncode, errors
            except subprocess.TimeoutExpired:
                log.info("compiling the C++ kernels: %.0f s so far", took + _SAY_SECONDS)
        compiler.kill()
    raise NotBuilt(f"{command[0]} did not end within {_COMPILE_SECONDS} s")


def _own(folder: Path) -> None:
    """Creates the folder, or checks that only this user writes to it, because code is loaded from it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise NotBuilt(f"{folder} belongs to user {status.st_uid}; it must belong to {os.getuid()}")
    if status.st_mode & 0o022:
        raise NotBuilt(f"{folder} has mode {stat.S_IMODE(status.st_mode):o}; only its owner may write to it")


def _cpu_info(name: str) -> str:
    """The first value of this name in /proc/cpuinfo, or an empty text."""
    pairs = (line.partition(":") for line in text_of(Path("/proc/cpuinfo")).splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
