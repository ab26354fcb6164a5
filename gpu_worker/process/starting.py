"""What makes a start cheap: lean imports, no garbage collections meanwhile, and a low priority beside another worker.

The folder's README says what each of them saves. If a version of Transformers imports the compiler all the same, the
log says so.
"""

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_DYNAMO = "torch._dynamo"
_INDEX_MODE = f"{_DYNAMO}._trace_wrapped_higher_order_op"
# Names of torch._dynamo that only mark a function for its tracer.
_MARKS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
# Only the compiler imports it.
_HEAVY = "sympy"
_ASKS_FOR_FLEX = "is_torch_flex_attn_available"
# Modules that the code of every model imports; importing `transformers` alone imports none of them.
_OF_EVERY_MODEL = ("modeling_utils", "masking_utils", "modeling_layers", "generation.utils")
_NICE = 10
_AUTOGROUP = Path("/proc/self/autogroup")

_Result = TypeVar("_Result")


@contextmanager
def without_collections(*, freezes: bool = True) -> Iterator[None]:
    """Suspends garbage collection, and, if it `freezes`, excludes the objects of the end from later collections.

    Imports make half a million objects that live as long as the process. Collections in between visit them again and
    again, which takes a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.freeze()
        if was_enabled:
            gc.enable()


def import_transformers(*, without_compiler: bool) -> None:
    """Imports what every model needs of Transformers.

    without_compiler: without Dynamo, distributed tensors and Transformers' own FlexAttention. Its functions are then
    not marked for torch.compile, so this is not for a process that compiles a model's code; it may compile other code.
    """
    leaves_out = without_compiler and _DYNAMO not in sys.modules
    try:
        _import_transformers(without_compiler=without_compiler, leaves_out=leaves_out)
    except (ImportError, AttributeError, TypeError):
        # What stands in for the compiler does not do for this version; a fault of another kind is raised again.
        if not leaves_out:
            raise
        _loaded(_DYNAMO)
        _import_transformers(without_compiler=False, leaves_out=False)
    if leaves_out and (compiler_is_loaded() or _HEAVY in sys.modules):
        version = sys.modules["transformers"].__version__
        log.info("Transformers %s imports torch's compiler: the start takes up to a second of CPU longer", version)


def _import_transformers(*, without_compiler: bool, leaves_out: bool) -> None:
    with ExitStack() as stack:
        if leaves_out:
            _leave_out_compiler(stack)
        importlib.import_module("transformers")
        _share_list_of_models(stack)
        if without_compiler:
            importlib.import_module("transformers.utils")
            # Where it is defined and wherever it was imported: modules take it from one or another.
            for name, module in list(sys.modules.items()):
                if name.startswith("transformers.") and _ASKS_FOR_FLEX in vars(module):
                    _replace(stack, module, _ASKS_FOR_FLEX, _no)
        for name in _OF_EVERY_MODEL:
            importlib.import_module(f"transformers.{name}")


def compiler_is_loaded() -> bool:
    """Whether torch.compile has been used, or could have been, in this process."""
    return _DYNAMO in sys.modules and not isinstance(sys.modules[_DYNAMO], _StandIn)


def _leave_out_compiler(stack: ExitStack) -> None:
    import torch

    # Transformers keeps this answer.
    _replace(stack, torch.distributed, "is_available", _no)
    for name in _MARKS & vars(torch.compiler).keys():
        _replace(stack, torch.compiler, name, _unmarked)
    # They stay: torch itself marks functions at their first call, among them custom operators.
    for name in (_DYNAMO, _INDEX_MODE):
        sys.modules[name] = _StandIn(name)


class _StandIn(ModuleType):
    """Takes the place of a module of Dynamo until a name other than a mark is read from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, loader=None)

    def __getattr__(self, name: str) -> Any:
        if self.__name__ == _DYNAMO and name in _MARKS:
            return _unmarked
        if self.__name__ == _INDEX_MODE and name == "TransformGetItemToIndex":
            # With it mask functions may index by tensors.
            return lambda: _loaded(_INDEX_MODE).TransformGetItemToIndex()
        if name.startswith("__") and (self.__name__, name) != (_DYNAMO, "__path__"):
            # Functions that look at every module (inspect.getmodule) load none. An import of a submodule does.
            raise AttributeError(f"{self.__name__} has not been loaded, {name} is unknown")
        return getattr(_loaded(self.__name__), name)


def _loaded(name: str) -> ModuleType:
    for module in (_DYNAMO, _INDEX_MODE):
        if isinstance(sys.modules.get(module), _StandIn):
            del sys.modules[module]
    return importlib.import_module(name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Takes the place of a decorator, with or without arguments, and returns the function itself."""
    return _unmarked if function is None else function


def _no() -> bool:
    return False


def _share_list_of_models(stack: ExitStack) -> None:
    """Gives the package `transformers.models` the list of models that `transformers` has made.

    Each would read the sources of all models, some 2,000 files, for the same list.
    """
    source = importlib.import_module("transformers.utils.import_utils")
    models = Path(str(source.__file__)).parents[1] / "models"
    original = source.define_import_structure

    def shared(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != models / "__init__.py":
            return original(module_path, prefix)
        # Kept by a cache, and `transformers` has added its own modules.
        return list_of_models(original(models, prefix="models"))

    _replace(stack, source, "define_import_structure", shared)


def list_of_models(of_transformers: dict[frozenset[str], dict[str, set[str]]]) -> dict[Any, dict[str, set[str]]]:
    """The part of an import structure that is below `models`, as that package names it."""
    start = "models."
    return {
        backends: {name.removeprefix(start): names for name, names in modules.items() if name.startswith(start)}
        for backends, modules in of_transformers.items()
    }


def _replace(stack: ExitStack, owner: Any, name: str, value: object) -> None:
    """Replaces an attribute, if there is one, until the stack ends."""
    if hasattr(owner, name):
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def keep_objects() -> None:
    """Collects garbage, and excludes all objects that exist now from later collections. Called once before serving.

    Torch, Transformers and compiled kernels leave some hundred thousand objects that live as long as the process. A
    full collection would visit them all, and delay a step.
    """
    gc.collect()
    gc.freeze()


def at_low_priority(work: Callable[[], _Result]) -> _Result:
    """Does the work in another thread with a low CPU priority. Returns its result, or raises its exception."""
    done = Future[_Result]()

    def run() -> None:
        try:
            os.nice(_NICE)
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # A daemon, so that an interrupt ends the process.
    thread = threading.Thread(target=run, name="low-priority", daemon=True)
    with _session_at_low_priority():
        thread.start()
        thread.join()
    return done.result()


@contextmanager
def _session_at_low_priority() -> Iterator[None]:
    """Lowers the priority of this process's session, unless the session belongs to another process."""
    # Some kernels have no groups of sessions, and containers may have a read-only /proc.
    with contextlib.suppress(OSError):
        if os.getsid(0) == os.getpid():
            _AUTOGROUP.write_text(str(_NICE))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if os.getsid(0) == os.getpid():
                _AUTOGROUP.write_text("0")
