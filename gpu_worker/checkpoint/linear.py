"""Linear layers as they are served: those that receive the same tensor merged into one product, packed on a CPU.

Merged are layers such as those of queries, keys and values. The first layer of a group computes the product of all and
keeps it; each later one returns its part if it is called with the same tensor, and the last one drops the product. A
layer that is called with another tensor computes its own part. Changing that tensor in place between the calls would
not be noticed; the groups come from a run of the model, and its self-check would fail.

Packed means in the layout of the C++ kernel of `native/linear.h`, or in oneDNN's where that kernel is not built.
Without either, or if a layer does not qualify, the plain layer stays. A tied weight is packed as a copy, and the
embedding keeps the original. Knows nothing of models.
"""

import ctypes
import math
from dataclasses import dataclass, field
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor, nn

from gpu_worker.attention.kv_cache import huge_zeros
from gpu_worker.native.library import NativeFunction, NativeLibrary, native_library

# Names of linear layers, by group.
Groups = tuple[tuple[str, ...], ...]
_WORD_BYTES = 4
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64


@dataclass(slots=True, eq=False)
class _Product:
    """The product of a merged weight with one input, while its parts are read."""

    sizes: list[int]
    # The group's first layer, which has the merged weight.
    first: "MergedLinear" = field(init=False)
    input: Tensor | None = None
    output: Tensor | None = None


class MergedLinear(nn.Module):
    """One layer of a group: y = x W^T + b for its part of the merged W and b."""

    def __init__(self, product: _Product, idx: int, merged: nn.Linear) -> None:
        super().__init__()
        self._product = product
        self._is_first, self._is_last = idx == 0, idx == len(product.sizes) - 1
        # The first row of W that is this layer's.
        self.begin = sum(product.sizes[:idx])
        self.in_features, self.out_features = merged.in_features, product.sizes[idx]
        if self._is_first:
            # Casts, parameters and packing find the merged layer here, and may replace it.
            self.merged = merged
            product.first = self

    @property
    def whole(self) -> nn.Module:
        return self._product.first.merged

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._product.first.merged.weight
        return weight[self.begin : self.begin + self.out_features]

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self._product.first.merged.bias
        return None if bias is None else bias[self.begin : self.begin + self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        product = self._product
        if self._is_first:
            product.input, product.output = x, self.merged(x)
        elif product.input is not x:
            return nn.functional.linear(x, self.weight, self.bias)
        output = product.output
        assert output is not None
        if self._is_last:
            product.input = product.output = None
        return output[..., self.begin : self.begin + self.out_features]


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and "forward" not in vars(module)


@torch.no_grad()
def merge_linears(model: nn.Module, groups: Groups) -> None:
    """Merges each group of layers, given by name; a name that is not a plain linear layer leaves its group as it is.

    Each group's own weights are freed before the next group is merged.
    """
    for names in groups:
        linears = [module for name in names if is_plain_linear(module := model.get_submodule(name))]
        if len(linears) == len(names):
            bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
            merged = linear_of(torch.cat([linear.weight for linear in linears]), bias)
            product = _Product([linear.out_features for linear in linears])
            for idx, name in enumerate(names):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, MergedLinear(product, idx, merged))


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearKernel:
    """y = x W^T + b for one dtype.

    W is packed as [panels, words, panel, elements per word]: panels of its rows, words along the input features.
    """

    # x, packed W, b or None, y (addresses); rows, input features, output features, threads.
    function: NativeFunction
    panel: int
    dtype: torch.dtype

    @property
    def per_word(self) -> int:
        """Elements in a word of 32 bits."""
        return _WORD_BYTES // self.dtype.itemsize

    def _packed_shape(self, weight: Tensor) -> tuple[int, int, int, int]:
        return -(-weight.shape[0] // self.panel), -(-weight.shape[1] // self.per_word), self.panel, self.per_word

    def packed_bytes(self, weight: Tensor) -> int:
        """Bytes of the packed weight, with its padding."""
        return math.prod(self._packed_shape(weight)) * weight.itemsize

    def pack(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """`weight` [output features, input features] packed, in the memory of the flat tensor `out` if given."""
        num_panels, num_words, panel, per_word = shape = self._packed_shape(weight)
        packed = weight.new_empty(shape) if out is None else out.view(shape)
        rows, columns = num_panels * panel - weight.shape[0], num_words * per_word - weight.shape[1]
        padded = nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
        return packed.copy_(padded.view(num_panels, panel, num_words, per_word).transpose(1, 2))

    def unpack(self, packed: Tensor, out_features: int, in_features: int) -> Tensor:
        num_panels, num_words, panel, per_word = packed.shape
        whole = packed.transpose(1, 2).reshape(num_panels * panel, num_words * per_word)
        return whole[:out_features, :in_features].contiguous()

    def pack_bias(self, bias: Tensor) -> Tensor:
        """`bias` in float32, padded to panels."""
        return nn.functional.pad(bias.float(), (0, -bias.shape[0] % self.panel))

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x W^T + b [..., out_features] for x [..., in_features] of this dtype. Raises ValueError.

        The result of a row depends neither on the other rows nor on the number of threads.
        """
        *leading, in_features = x.shape
        if x.dtype is not self.dtype or packed.shape[1] != -(-in_features // self.per_word):
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, the layer takes {self.dtype} {list(packed.shape)}")
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty((*leading, out_features))
        self.function(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            y.numel() // out_features,
            in_features,
            out_features,
            torch.get_num_threads(),
        )
        return y


@cache
def linear_kernel(dtype: torch.dtype) -> LinearKernel | None:
    library = native_library()
    return None if library is None else kernel_of(library, dtype)


def kernel_of(library: NativeLibrary, dtype: torch.dtype) -> LinearKernel | None:
    name = f"tandem_linear_{str(dtype).removeprefix('torch.')}"
    if not hasattr(library.functions, name):
        return None
    panel = library.functions.tandem_linear_panel
    panel.restype = _SIZE
    return LinearKernel(
        function=library.function(name, *[_ADDRESS] * 4, *[_SIZE] * 3, ctypes.c_int32), panel=panel(), dtype=dtype
    )


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
        self.is_native = self._kernel is not None
        if self._kernel is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            self._multiply = _multiply_onednn
        else:
            self._packed = self._kernel.pack(weight, memory)
            self._multiply = self._kernel.multiply
            if self.bias is not None:
                self._bias = self._kernel.pack_bias(self.bias)

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


# Inductor does not know this operator: its own lowering of oneDNN's requires static shapes.
_library = torch.library.Library("tandem", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_library.impl("packed_linear", _multiply_onednn, "MkldnnCPU")
_library.impl("packed_linear", _multiply_native, "CPU")
torch.library.register_fake(
    "tandem::packed_linear", lambda x, packed, bias, out: x.new_empty(*x.shape[:-1], out), lib=_library
)


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
    sizes = [0 if (kernel := linear_kernel(given.dtype)) is None else kernel.packed_bytes(given) for given in weights]
    if not any(sizes):
        return [None] * len(weights)
    parts = huge_zeros((sum(sizes),), torch.uint8).split(sizes)
    return [part.view(weight.dtype) if part.numel() else None for part, weight in zip(parts, weights, strict=True)]
