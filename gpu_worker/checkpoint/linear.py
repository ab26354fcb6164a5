"""Packs linear layers for a CPU: in the layout of the C++ kernel, or in oneDNN's where that kernel is not built.

Owns the replacement of nn.Linear. Without either, or if a layer does not qualify, the plain layer stays. A tied weight
is packed as a copy, and the embedding keeps the original. Knows nothing of models.
"""

import torch
from torch import Tensor, nn

from gpu_worker.attention.kv_cache import huge_zeros
from gpu_worker.checkpoint.merged import is_plain_linear
from gpu_worker.checkpoint.native_linear import linear_kernel


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed; inference only."""

    def __init__(self, linear: nn.Linear, memory: Tensor | None = None) -> None:
        """memory: a flat tensor that receives W; only the C++ kernel's layout uses it."""
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.num_bytes, self.dtype = weight.nbytes, weight.dtype
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # Tensors are hidden from state dicts and casts, because only this module's forward understands the layout.
        self.bias = self._bias = None if linear.bias is None else linear.bias.detach()
        self._kernel = linear_kernel(weight.dtype)
        if self._kernel is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._multiply = _multiply_onednn
        else:
            self._packed = self._kernel.pack(weight, memory)
            self._multiply = self._kernel.multiply
            if self.bias is not None:
                self._bias = self._kernel.pack_bias(self.bias)

    @property
    def is_native(self) -> bool:
        """Whether the C++ kernel computes this layer."""
        return self._kernel is not None

    @property
    def weight(self) -> Tensor:
        """W in the plain layout, unpacked at each use, because some models compute with a layer's weight directly."""
        if self._kernel is None:
            return self._packed.to_dense()
        return self._kernel.unpack(self._packed, self.out_features, self.in_features)

    @torch.no_grad()
    def replace(self, leaf: str, value: Tensor) -> None:
        """Replaces W (`leaf` is "weight") or b ("bias") in the same memory, but for oneDNN's layout, which is new."""
        if leaf == "bias":
            assert self.bias is not None and self._bias is not None
            self.bias.copy_(value)
            self._bias[: self.out_features].copy_(value)
        elif self._kernel is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(value.to(self.dtype).contiguous())
        else:
            self._kernel.pack(value.to(self.dtype).contiguous(), self._packed.view(-1))

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.tandem.packed_linear(x, self._packed, self._bias, self.out_features)
        return self._multiply(x, self._packed, self._bias, self.out_features)


def _multiply_onednn(x: Tensor, packed: Tensor, bias: Tensor | None, _: int) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _multiply_native(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    kernel = linear_kernel(packed.dtype)
    assert kernel is not None
    return kernel.multiply(x, packed, bias, out_features)


def _shape_of_packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


# Inductor does not know this operator: its own lowering of oneDNN's requires static shapes.
_library = torch.library.Library("tandem", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_library.impl("packed_linear", _multiply_onednn, "MkldnnCPU")
_library.impl("packed_linear", _multiply_native, "CPU")
torch.library.register_fake("tandem::packed_linear", _shape_of_packed_linear, lib=_library)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device and dtype support packing; for oneDNN's layout a small layer shows it."""
    if device.type != "cpu":
        return False
    if linear_kernel(dtype) is not None:
        return True
    if dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    probe = nn.Linear(8, 8, bias=False)
    try:
        with torch.inference_mode():
            return torch.allclose(PackedLinear(probe)(torch.ones(2, 8)), probe(torch.ones(2, 8)), rtol=1e-5, atol=1e-6)
    except (AttributeError, RuntimeError):
        return False


def pack_linears(model: nn.Module) -> int:
    """Replaces the plain linear layers of `model` one by one, so that each frees its weight. Returns their number."""
    places = [
        (module, name)
        for module in model.modules()
        for name, child in module.named_children()
        if is_plain_linear(child) and can_pack(child.weight.device, child.weight.dtype)
    ]
    memory = _packed_memory([getattr(module, name).weight for module, name in places])
    for (module, name), part in zip(places, memory, strict=True):
        setattr(module, name, PackedLinear(getattr(module, name), part))
    return len(places)


def _packed_memory(weights: list[Tensor]) -> list[Tensor | None]:
    """Memory for each packed weight, in huge pages that all share; the system provides it as it is written.

    With huge pages one row's weights are read at 27 GB/s instead of 24 (512 x 8,192, one core).
    """
    sizes = [0 if (kernel := linear_kernel(each.dtype)) is None else kernel.packed_bytes(each) for each in weights]
    if not any(sizes):
        return [None] * len(weights)
    parts = huge_zeros((sum(sizes),), torch.uint8).split(sizes)
    return [part.view(weight.dtype) if part.numel() else None for part, weight in zip(parts, weights, strict=True)]
