"""The C++ kernels of a CPU as Python functions of addresses and sizes, and the recording of their calls.

Owns the loaded library. Its callers declare the functions. A recorded call is a function and a copy of its arguments,
which the library repeats without Python (`recorded.h`); the memory that the arguments point to belongs to the code
that recorded them. Knows nothing of attention, models or steps.

The library also writes the last line of a worker that a signal in its own code ends: Python's faulthandler, which
`__main__` enables, writes the stacks, and the handler of `crash.h` a line with the phase and a hint. A worker without
the library, or one that ends before it is loaded, leaves the stacks alone.
"""

import ctypes
import faulthandler
import logging
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Torch loads its own OpenMP library for the whole process, so it is imported first: the kernels then share its threads.
import torch  # noqa: F401

from gpu_worker.native.build import NotBuilt, best_instruction_set, built_library, cpu_flags
from gpu_worker.phases import on_phase
from tandem_contract import logs

_FLOAT = struct.Struct("<fi")
_QWORD = struct.Struct("<q")
log = logging.getLogger(__name__)
_HINT = "--native-kernels off serves without the C++ kernels, more slowly"
# Those of crash.h.
HINTS = {
    signal.SIGSEGV: _HINT,
    signal.SIGBUS: "a mapped file, such as the model's, became shorter, or its disk or /dev/shm is full or fails",
    signal.SIGILL: _HINT,
    signal.SIGFPE: _HINT,
    signal.SIGABRT: _HINT,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    name: str
    # The address of the function of words.
    function: int
    # One for each argument.
    words: "ctypes.Array[ctypes.c_int64]"
    # Copies of the structures to which words point.
    structures: tuple[ctypes.Structure, ...]


# Receives each call after it was made.
_recorder: Callable[[RecordedCall], None] | None = None


@contextmanager
def recording(recorder: Callable[[RecordedCall], None] | None) -> Iterator[None]:
    """Within it, every call of a NativeFunction is recorded too. One recorder at a time, on one thread.

    recorder: None for the calls of an operator that is recorded as a whole.
    """
    global _recorder
    assert recorder is None or _recorder is None, "calls are being recorded already"
    before, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = before


class NativeFunction:
    """A function of the library without a result. It checks no argument."""

    def __init__(self, functions: ctypes.CDLL, name: str, *types: Any) -> None:
        """types: those of ctypes; a structure type stands for a pointer to one. Raises AttributeError if the library
        has no function of this name."""
        self.name = name
        self._run: Any = getattr(functions, name)
        self._run.argtypes = [
            ctypes.POINTER(type_) if issubclass(type_, ctypes.Structure) else type_ for type_ in types
        ]
        self._run.restype = None
        self._of_words: int | None = ctypes.cast(getattr(functions, f"{name}_recorded"), ctypes.c_void_p).value

    def __call__(self, *arguments: Any) -> None:
        """Structures are passed as they are."""
        self._run(*arguments)
        if _recorder is not None:
            _recorder(self._recorded(arguments))

    def _recorded(self, arguments: Sequence[Any]) -> RecordedCall:
        copies = tuple(type(item).from_buffer_copy(item) for item in arguments if isinstance(item, ctypes.Structure))
        places = iter(copies)
        words = [
            ctypes.addressof(next(places)) if isinstance(item, ctypes.Structure) else _word(item, kind)
            for item, kind in zip(arguments, self._run.argtypes, strict=True)
        ]
        assert self._of_words is not None
        return RecordedCall(
            name=self.name, function=self._of_words, words=(ctypes.c_int64 * len(words))(*words), structures=copies
        )


def _word(value: Any, kind: Any) -> int:
    """The word that has an argument in its first bytes."""
    if kind is ctypes.c_float:
        return int(_QWORD.unpack(_FLOAT.pack(value, 0))[0])
    return 0 if value is None else int(value)


class _Entry(ctypes.Structure):
    """recorded::Call of recorded.h."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class RecordedCalls:
    """Recorded calls that the library repeats one after another."""

    def __init__(self, functions: ctypes.CDLL, calls: Sequence[RecordedCall]) -> None:
        # Kept, because the library reads their arguments.
        self.calls = tuple(calls)
        entries = [_Entry(call.function, ctypes.addressof(call.words)) for call in self.calls]
        self._entries, self._count = (_Entry * len(entries))(*entries), len(entries)
        self._repeat: Any = functions.tandem_repeat
        self._repeat.argtypes, self._repeat.restype = (ctypes.c_void_p, ctypes.c_int64), None

    def __call__(self) -> None:
        self._repeat(self._entries, self._count)


_are_left_out = False


class NativeLibrary:
    """One compiled library. Its functions check no argument: callers pass tensors of the documented shapes."""

    def __init__(self, path: Path, instructions: str) -> None:
        self.instructions = instructions
        self.functions = ctypes.CDLL(str(path))

    def function(self, name: str, *types: Any) -> NativeFunction:
        return NativeFunction(self.functions, name, *types)


def leave_out_kernels() -> None:
    """Makes `native_library` return None in this process. Call it before anything asks for the library."""
    global _are_left_out
    _are_left_out = True
    native_library.cache_clear()


@cache
def native_library() -> NativeLibrary | None:
    """The kernels for this machine, built if necessary; None if that fails, and the log says why."""
    if _are_left_out:
        return None
    begun = time.perf_counter()
    try:
        instructions = best_instruction_set(cpu_flags())
        library = NativeLibrary(built_library(instructions), instructions.name)
    except (NotBuilt, OSError) as error:
        log.warning("torch's operators compute attention, linear layers and the rest, more slowly: %s", error)
        return None
    log.info("C++ kernels for %s: %.2f s", library.instructions, time.perf_counter() - begun)
    return library


def write_last_line() -> None:
    """Has this process write the line, which names the phase of the start that began last. Loads the library."""
    library = native_library()
    # Where stderr is another object, this process is not the worker's own.
    if library is None or sys.stderr is None or sys.stderr is not sys.__stderr__:
        return

    def follow(phase: str) -> None:
        for number, hint in HINTS.items():
            cause = f'native code was ended by {number.name} in the phase "{phase}", or right after it; {hint}'
            # Faulthandler may have met its fault in the middle of a line.
            line = "\n" + logs.closing_line("gpu_worker", cause)
            library.functions.tandem_set_crash_line(number.value, line.encode())

    on_phase(follow)
    # Faulthandler hands a signal on to the handler before it: after its stacks, or at once if it meets a fault of its
    # own, because the stack that it reads was overwritten.
    faulthandler.disable()
    library.functions.tandem_install_crash_line()
    faulthandler.enable()
