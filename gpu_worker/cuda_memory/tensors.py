"""Tensors on memory that torch did not allocate.

Knows nothing of who owns the memory: it must stay mapped at its addresses while a tensor of it is used.
"""

import ctypes

import torch
from torch import Tensor


class _Memory:
    """Device memory in the form that torch reads (the CUDA array interface)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """A uint8 tensor [num_bytes] over the memory at the address.

    On a GPU, torch asks the driver whose address it is, so memory must be mapped at the first byte.
    """
    if device.type != "cuda":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Memory(address, num_bytes), device=device)
