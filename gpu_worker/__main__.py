"""`python -m gpu_worker`: settings, start-up, then serving until a signal.

Owns the process: its logging, its exit code and its last line, which for a failed start is `<cause>; <hint>`.
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_worker.config import SettingsRefused, WorkerSettings, load_settings
from gpu_worker.failures import explain, is_expected

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 after a signal, 1 where the worker cannot serve, 2 for settings."""
    begun = time.perf_counter()
    try:
        settings = load_settings(arguments)
    except SettingsRefused as error:
        print(f"gpu_worker: {error}", file=sys.stderr)
        return 2
    if settings.exit_with_parent:
        die_with_parent()
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s worker %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    keep_compiled_kernels()
    log = logging.getLogger("gpu_worker")
    try:
        serve(settings, begun, log)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_expected(error):
            log.exception("the worker cannot go on")
        print(f"gpu_worker: {explain(error)}", file=sys.stderr)
        return 1
    log.info("stopped")
    return 0


def serve(settings: WorkerSettings, begun: float, log: logging.Logger) -> None:
    """Starts and serves until a signal. Raises what stopped it."""
    # Torch takes seconds to import; a wrong flag should not.
    from gpu_worker.link import Link
    from gpu_worker.runner import MAX_IN_FLIGHT
    from gpu_worker.startup import start

    log.info("%-36s %7.2f s", "imports", time.perf_counter() - begun)
    own_runtime_dir(settings.runtime_dir)
    worker = start(settings)
    endpoint = f"ipc://{settings.runtime_dir}/worker.sock"
    log.info("%-36s %7.2f s", "ready", time.perf_counter() - begun)
    log.info("waiting for a scheduler at %s", endpoint)
    Link(endpoint, worker.join, worker.runner, max_in_flight=MAX_IN_FLIGHT).serve()


def own_runtime_dir(path: Path) -> None:
    """Makes the folder of the sockets, or checks that it is this user's alone: whoever owns it can be the core.

    Raises ValueError or OSError.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise ValueError(f"runtime_dir {path} belongs to user {found.st_uid}; it must belong to {os.getuid()}")
    if found.st_mode & 0o077:
        raise ValueError(f"runtime_dir {path} has mode {found.st_mode & 0o777:o}; it must be 700")


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, so that no orphan holds a device."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def keep_compiled_kernels() -> None:
    """Compiled kernels outlive the process: in the user's cache folder, or where TORCHINDUCTOR_CACHE_DIR says."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "inductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own teardown takes seconds once torch is loaded, and a device is wanted back at once.
    os._exit(exit_code)
