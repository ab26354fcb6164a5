"""The machine: CPU affinity, resource use, and its description in a report."""

import glob
import importlib.metadata
import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil

ENGINE_CORE, REST_CORE = 0, 1
_TCMALLOC = "/usr/lib/*/libtcmalloc_minimal.so.4"
_PACKAGES = ("torch", "transformers", "grpcio", "pyzmq", "protobuf", "numpy")


def check_cores() -> None:
    """Raises SystemExit if this process may not use two cores."""
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("the benchmark needs two cores: one for the engine, one for everything else")


def engine_cores(threads: int) -> set[int]:
    """Returns the cores of an engine: one of two threads may use both."""
    return {ENGINE_CORE} if threads == 1 else {ENGINE_CORE, REST_CORE}


def place_engine(pid: int, threads: int) -> None:
    os.sched_setaffinity(pid, engine_cores(threads))


def place_rest(pid: int, threads: int) -> None:
    """Pins what is not the engine to the other core; beside an engine of two threads it may use both cores."""
    cores = {REST_CORE} if threads == 1 else {ENGINE_CORE, REST_CORE}
    os.sched_setaffinity(pid, cores)


def tcmalloc() -> str:
    """Returns the file of tcmalloc (Debian: libtcmalloc-minimal4), or an empty text if the machine has none."""
    return next(iter(sorted(glob.glob(_TCMALLOC))), "")


def preload(*libraries: str) -> dict[str, str]:
    """Returns the environment variable that loads the libraries before all others; empty names are left out."""
    found = [library for library in libraries if library]
    return {"LD_PRELOAD": ":".join(found)} if found else {}


def peak_mb(pid: int | str = "self") -> float:
    """Returns VmHWM, the peak of resident memory, in 10^6 bytes."""
    return memory_bytes(pid, "VmHWM") / 1e6


def memory_bytes(pid: int | str, field: str) -> int:
    """Returns a size of the process's memory, as /proc/PID/status names it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no {field}")


def cpu_seconds(pid: int | None = None) -> float:
    """Returns the user and system time of a process so far, with all its threads."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def thread_seconds(pid: int, *, waited: bool = False) -> float:
    """Returns the CPU seconds of a process's threads; `waited`: those in which they waited for their core."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        # A thread may end meanwhile.
        with suppress(OSError):
            total += int(path.read_text().split()[waited])
    return total / 1e9


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **found}


def description() -> dict[str, object]:
    """Describes the CPU, the cores, and the load of the machine at the beginning of the report."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2)}
