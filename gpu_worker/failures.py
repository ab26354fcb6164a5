"""Explains in one line why the worker cannot continue: the cause, then a hint.

Owns the wording for failures of the machine. Exceptions of this package contain both already. Imports no torch, because
torch's import may be what fails; its exceptions are recognised by name.
"""

import errno
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from tandem_contract.version import how_to_install

_MEMORY_SETTINGS = "a smaller pool_bytes, max_rows or token_budget needs less"
# Messages of torch's other exceptions: its allocator on a CPU, the CUDA runtime and libraries, C++.
_OF_DEVICE = ("OutOfMemoryError", "AcceleratorError")
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator", "Cannot allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED", "bad_alloc",
)  # fmt: skip
# Inductor's message, and Triton's.
_NO_COMPILER = ("No working C++ compiler", "Failed to find C compiler")
# The message of the module tempfile, with the error number of a missing file.
_NO_TEMPORARY_FOLDER = "No usable temporary directory found"
_C_COMPILER = re.compile(r"\b(g?cc|[gc]\+\+|clang(\+\+)?)(?!\w)")
_ROOM = (
    "XDG_CACHE_HOME, TORCHINDUCTOR_CACHE_DIR and HF_HOME set the folders of kernels and models, TMPDIR that of "
    "temporary files"
)
# Hints by the operating system's error number.
_OF_FILES = {
    errno.EACCES: "it must be readable by the user that runs the worker",
    errno.EPERM: "it must be readable by the user that runs the worker",
    errno.EROFS: _ROOM,
    errno.ENOENT: "check the path, or download the model again",
    errno.EIO: "the disk or the network share that it is on fails; copy the model elsewhere",
    errno.ESTALE: "the network share that it is on went away; mount it again",
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "ulimit -f allows too small files",
    errno.EMFILE: "ulimit -n allows too few open files",
}


def is_expected(error: BaseException) -> bool:
    """Whether one line explains the error, so that a traceback would not help."""
    is_plain = isinstance(error, (ValueError, OSError, MemoryError, ImportError)) or is_out_of_memory(error)
    needed = _needed_to_compile(error)
    is_plain = is_plain or "install" in needed or (needed != "" and os.strerror(errno.ENOSPC) in str(error))
    return is_plain or type(error).__name__ in ("AcceleratorError", "DeviceLost", "JoinRefused")


def explain(error: BaseException) -> str:
    """`<cause>; <hint>` in one line."""
    reason, kind = first_line(error), type(error).__name__
    if is_out_of_memory(error) and (kind in _OF_DEVICE or "_STATUS_ALLOC_FAILED" in reason):
        return f"the GPU is out of memory: {reason}; {_MEMORY_SETTINGS}, nvidia-smi shows what else uses the GPU"
    if is_out_of_memory(error):
        return f"host memory is used up: {reason}; {_MEMORY_SETTINGS}, as does dtype bfloat16"
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        where = f"{error.filename}: " if error.filename else ""
        hint = _ROOM if _is_of_writing(error) else _OF_FILES[error.errno]
        return f"{where}{(error.strerror or reason).lower()}; {hint}"
    if isinstance(error, ImportError):
        return f"{reason}; install what the worker needs with: {how_to_install('worker')}"
    if needed := _needed_to_compile(error):
        return f"a kernel cannot be compiled: {reason}; {needed}"
    if kind in ("AcceleratorError", "DeviceLost"):
        return f"the GPU failed: {reason}; start the worker again, nvidia-smi -q and dmesg show faults of the device"
    if kind == "JoinRefused":
        return f"the scheduler refused this worker: {reason}"
    if isinstance(error, (ValueError, OSError)):
        return reason
    return f"{kind}: {reason}; this is a fault of the worker, its traceback is in the log"


def _is_of_writing(error: OSError) -> bool:
    """Whether a file could not be made: this user may look into its folder and it is not there, or no folder is."""
    if isinstance(error, PermissionError):
        if error.filename is None:
            return False
        folder = os.path.dirname(os.path.abspath(error.filename))
        return os.access(folder, os.X_OK) and not os.path.lexists(error.filename)
    return error.errno == errno.ENOENT and str(error.strerror).startswith(_NO_TEMPORARY_FOLDER)


def _needed_to_compile(error: BaseException) -> str:
    """What a compilation that failed needs: a package if one is missing; empty for other errors.

    Triton's message names only the command of the C compiler, which prints its own errors.
    """
    text, module = str(error), type(error).__module__
    has_no_compiler = any(sign in text for sign in _NO_COMPILER)
    is_by_command = isinstance(error, subprocess.CalledProcessError) and _C_COMPILER.search(str(error.cmd))
    if not (has_no_compiler or is_by_command or module.startswith(("torch._inductor", "torch._dynamo", "triton"))):
        return ""
    if has_no_compiler or "CxxCompiler" in type(error).__name__:
        return "install g++ (Debian: apt install g++), or name a compiler in CC and CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if "Python.h" in text or not header.exists():
        return f"{header} is missing: install Python's headers (Debian: apt install python3-dev)"
    return f"{_room_for_kernels()} and a working compiler are needed"


def _room_for_kernels() -> str:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    try:
        return f"room in TORCHINDUCTOR_CACHE_DIR ({folder} has {shutil.disk_usage(folder).free >> 20} MiB free)"
    except OSError as error:
        return f"a folder in TORCHINDUCTOR_CACHE_DIR ({folder}: {error.strerror})"


def first_line(error: BaseException) -> str:
    """The first line of the message that is not empty, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:500].rstrip(".")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the machine was used up. The process can go on with less."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
