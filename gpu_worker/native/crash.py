"""The last words of a worker whose own code is ended by a signal: the stacks, then one line with the phase and a hint.

Python's faulthandler, which `__main__` enables, writes the stacks, and the handler of `crash.h` the line. The line
needs the library: a worker without the C++ kernels, or one that ends before they are loaded, leaves the stacks alone.
"""

import faulthandler
import signal
import sys

from gpu_worker.native.library import native_library
from gpu_worker.phases import on_phase
from tandem_contract import logs

_HINT = "--native-kernels off serves without the C++ kernels, more slowly"
# Those of crash.h.
HINTS = {
    signal.SIGSEGV: _HINT,
    signal.SIGBUS: "a mapped file, such as the model's, became shorter, or its disk or /dev/shm is full or fails",
    signal.SIGILL: _HINT,
    signal.SIGFPE: _HINT,
    signal.SIGABRT: _HINT,
}


def write_last_line() -> None:
    """Has this process write the line, which names the phase of the start that began last. Loads the library."""
    library = native_library()
    # Where stderr is another object, this process is not the worker's own.
    if library is None or sys.stderr is None or sys.stderr is not sys.__stderr__:
        return

    def follow(phase: str) -> None:
        for number, hint in HINTS.items():
            cause = f'native code was ended by {number.name} in the phase "{phase}", or right after it; {hint}'
            library.functions.tandem_set_crash_line(number.value, logs.closing_line("gpu_worker", cause).encode())

    on_phase(follow)
    # Faulthandler hands a signal on to the handler before it: after its stacks, or at once if it meets a fault of its
    # own, because the stack that it reads was overwritten.
    faulthandler.disable()
    library.functions.tandem_install_crash_line()
    faulthandler.enable()
