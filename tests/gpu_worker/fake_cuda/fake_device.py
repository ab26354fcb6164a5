"""A CUDA device without a GPU: tensors on it have shapes, types and storages, and no data.

`FakeCuda.present` makes torch accept the device. Within it, tensors on the device are fake, and FakeTensorMode refuses
every operator that must know their data; tensors on the host are real, so that numpy can read and write them.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from gpu_worker.attention.paged import assign_kv
from gpu_worker.cuda import flex
from tests.gpu_worker.fake_cuda.trace import Trace

CUDA = torch.device("cuda", 0)
# What the worker and torch ask of the device. The figures are those of an H200.
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150_754_820_096,
    multi_processor_count=132,
    shared_memory_per_block_optin=232_448,
    gcnArchName="",
)
_GUARD_SOURCE = Path(__file__).with_name("no_op_guard.cpp")


# Operators that are seen as what they call: their arguments do not name all the memory that they use.
_SEEN_THROUGH = frozenset(("tandem::attend",))


class FakeEvent:
    """An event that has always happened."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1.0


# What the functions of torch.cuda answer.
_ANSWERS: dict[str, Any] = {
    "Event": FakeEvent,
    "_lazy_init": lambda: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "synchronize": lambda device=None: None,
}


@cache
def _load_guard() -> None:
    """Compiles the guard, once per version of torch and of its source, and loads it for the rest of the process."""
    if torch.version.cuda is not None:
        return
    source = _GUARD_SOURCE.read_bytes()
    name = hashlib.sha256(source + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"tandem_no_op_guard_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"{name}.so"
    if not library.exists():
        torch_folder = Path(torch.__file__).parent
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", "-o", str(unfinished)]
        command += [str(_GUARD_SOURCE), f"-L{torch_folder / 'lib'}", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        unfinished.rename(library)
    ctypes.CDLL(str(library))


class FakeCuda(TorchDispatchMode):
    """The device's operators. Enter `present` instead of the mode itself."""

    def __init__(self) -> None:
        super().__init__()
        # Every operator that touches the device.
        self.trace = Trace()
        self._fake_tensors: FakeTensorMode | None = None
        # Page-locked memory: storages by address; keeping them keeps the addresses taken.
        self._page_locked: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within it, torch has the device."""
        _load_guard()
        torch._C._ensureCUDADeviceGuardSet()
        with ExitStack() as stack:
            for name, answer in _ANSWERS.items():
                stack.enter_context(patch.object(torch.cuda, name, answer))
            stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
            stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", property(lambda mode: True)))
            # Triton's kernels have no results without data; assignment writes the same places.
            stack.enter_context(patch.object(flex, "_writer", lambda table: assign_kv))
            # A second mode would make copies of the tensors of the first.
            self._fake_tensors = self._fake_tensors or FakeTensorMode(allow_non_fake_inputs=True)
            stack.enter_context(self._fake_tensors)
            stack.enter_context(self)
            yield

    def start_trace(self) -> Trace:
        """Returns a new trace of what happens from now on."""
        self.trace = Trace()
        return self.trace

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Whether a host tensor was made with `pin_memory`."""
        return tensor.untyped_storage()._cdata in self._page_locked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if func._schema.name in _SEEN_THROUGH:
            with self:
                return func._op_dk(torch._C.DispatchKey.CUDA, *args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in tensors)
        if not is_fake and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return self._on_host(func, args, kwargs)
        seen = self.trace.begin(func, leaves)
        hosts = [leaf for leaf in tensors if not isinstance(leaf, FakeTensor)]
        if func is torch.ops.aten.copy_.default and hosts:
            page_locked, non_blocking = self.is_page_locked(hosts[0]), len(args) > 2 and args[2]
            self.trace.cross(func, to_device=args[1] is hosts[0], waits=not (page_locked and non_blocking))
            result = args[0]
        else:
            result = func(*args, **kwargs)
            if len({leaf.device.type for leaf in (*tensors, *tree_flatten(result)[0]) if isinstance(leaf, Tensor)}) > 1:
                self.trace.cross(func, to_device=result.device.type == "cuda", waits=True)
        self.trace.end(seen, result)
        return result

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_page_locked = kwargs.pop("pin_memory", False)
        with _disable_current_modes():
            result = func(*args, **kwargs)
        if is_page_locked:
            storage = result.untyped_storage()
            self._page_locked[storage._cdata] = storage
        return result


def on_fake_cuda(meta_model: PreTrainedModel) -> PreTrainedModel:
    """Moves a meta model to the fake device, within `FakeCuda.present`; tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    for module in meta_model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = moved.setdefault(id(parameter), nn.Parameter(_like(parameter), requires_grad=False))
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved.setdefault(id(buffer), _like(buffer))
    return meta_model


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
