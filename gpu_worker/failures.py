"""Why the worker cannot go on, in one line: the cause, and what would help.

Owns the wording for what the machine refuses. Exceptions of this package say both themselves. Imports no torch, whose
own import may be what fails: its exceptions go by name.
"""

import errno
import os
import shutil
import tempfile

_MEMORY_SETTINGS = "a smaller pool_bytes, max_rows or token_budget needs less"
# What the operating system says, and what helps.
_OF_FILES = {
    errno.EACCES: "it must be readable by the user that runs the worker",
    errno.EPERM: "it must be readable by the user that runs the worker",
    errno.ENOENT: "check the path, or download the model again",
    errno.EIO: "the disk or the network share that it is on fails; copy the model elsewhere",
    errno.ESTALE: "the network share that it is on went away; mount it again",
    errno.ENOSPC: "TORCHINDUCTOR_CACHE_DIR and HF_HOME say where kernels and models are kept",
    errno.EDQUOT: "TORCHINDUCTOR_CACHE_DIR and HF_HOME say where kernels and models are kept",
    errno.EMFILE: "ulimit -n allows too few open files",
}


def is_expected(error: BaseException) -> bool:
    """Whether its one line tells all there is: no traceback would help."""
    told = isinstance(error, (ValueError, OSError, MemoryError, ImportError)) or _is_out_of_memory(error)
    return told or type(error).__name__ in ("AcceleratorError", "DeviceLost", "JoinRefused")


def explain(error: BaseException) -> str:
    """`<cause>; <hint>` in one line."""
    reason, kind = first_line(error), type(error).__name__
    if kind == "OutOfMemoryError":
        return f"the GPU is out of memory: {reason}; {_MEMORY_SETTINGS}, nvidia-smi shows who else uses the GPU"
    if _is_out_of_memory(error):
        return f"main memory is used up: {reason}; {_MEMORY_SETTINGS}, as does dtype bfloat16"
    if isinstance(error, OSError) and error.errno in _OF_FILES:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{(error.strerror or reason).lower()}; {_OF_FILES[error.errno]}"
    if isinstance(error, ImportError):
        return f"{reason}; pip install 'tandem[worker]' brings what the worker needs"
    if "CxxCompiler" in kind or "No working C++ compiler" in str(error):
        return f"{reason}; kernels for a CPU are compiled: install g++, or name a compiler in CXX"
    if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
        return f"a kernel cannot be compiled: {reason}; {_room_for_kernels()} and a working compiler are needed"
    if kind in ("AcceleratorError", "DeviceLost"):
        return f"the GPU failed: {reason}; start the worker again, nvidia-smi -q and dmesg show faults of the device"
    if kind == "JoinRefused":
        return f"the scheduler refused this worker: {reason}"
    if isinstance(error, (ValueError, OSError)):
        return reason
    return f"{kind}: {reason}; the lines above say where"


def _room_for_kernels() -> str:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()
    try:
        return f"room in TORCHINDUCTOR_CACHE_DIR ({folder} has {shutil.disk_usage(folder).free >> 20} MiB free)"
    except OSError as error:
        return f"a folder in TORCHINDUCTOR_CACHE_DIR ({folder}: {error.strerror})"


def first_line(error: BaseException) -> str:
    """The first line that says something, without its end's stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:500].rstrip(".")


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # Torch's own on a CPU.
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in str(error) or "Cannot allocate memory" in str(error)
    )
