"""Makes torch, Dynamo, Inductor and Triton see one CUDA card on a machine that has none.

Owns the replaced functions. After `install`, tensors on `cuda` exist under FakeTensorMode (shapes without data),
Inductor generates Triton code for the card, and Triton compiles it to a cubin. Nothing can be launched. It needs a CUDA
build of torch and Triton, and acts on the whole process: a process imitates one card.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor.runtime import triton_helpers
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels.cards import Card

_REGISTERS = 65536


class Driver:
    """The answers that Triton needs to compile: the target, and limits of the device."""

    def __init__(self, card: Card) -> None:
        self._target = GPUTarget("cuda", card.sm, 32)
        limits = {
            "max_shared_mem": card.shared_per_block,
            "max_num_regs": _REGISTERS,
            "multiprocessor_count": card.num_multiprocessors,
            "warpSize": 32,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda _: limits)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Stream:
    cuda_stream = device_index = stream_id = 0


def install(card: Card) -> None:
    """Replaces what asks a driver. To be called once, before anything is compiled."""
    properties = types.SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.total_memory,
        multi_processor_count=card.num_multiprocessors,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=card.threads_per_multiprocessor,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=card.shared_per_block,
        shared_memory_per_multiprocessor=card.shared_per_multiprocessor,
        L2_cache_size=card.l2_bytes,
        gcnArchName="",
    )
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda *_, **__: True,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "current_stream": lambda *_: _Stream(),
        "memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (card.free_memory, card.total_memory),
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(interface, name):
            setattr(interface, name, staticmethod(answer))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        setattr(interface, name, staticmethod(lambda _: 0))
    interface.Worker.get_device_properties = staticmethod(answers["get_device_properties"])
    interface.Worker.current_device = staticmethod(answers["current_device"])
    torch.cuda.random.current_device = answers["current_device"]
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    fake_tensor.init_gpu_context = lambda _: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda _: True)
    driver.set_active(Driver(card))
    triton_helpers.set_driver_to_gpu = lambda: None
    # One process compiles, in order; the launchers and caches of the real device are not needed.
    inductor_config.compile_threads = 1
    inductor_config.use_static_cuda_launcher = False
    inductor_config.fx_graph_cache = False
