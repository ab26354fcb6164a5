"""Packs linear layers in oneDNN's layout on a CPU, as inductor's freezing does for compiled models.

Owns the replacement of nn.Linear. If the operators are missing or the layer does not qualify, the plain layer stays. A
tied weight is packed as a copy, and the embedding keeps the original. Knows nothing of models.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """y = x W^T + b with W prepacked; inference only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().contiguous()
        self.num_bytes = weight.nbytes
        # Hidden from state dicts and casts, because only this module's forward understands the layout.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """W in the plain layout, unpacked at each use, because some models compute with a layer's weight directly."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.tandem.packed_linear(x, self._packed, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _shape_of_packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


# The same operator under a name that Inductor does not know: its own lowering requires static shapes.
_library = torch.library.Library("tandem", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.impl("packed_linear", _packed_linear, "MkldnnCPU")
torch.library.register_fake("tandem::packed_linear", _shape_of_packed_linear, lib=_library)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device and dtype support packing, which a small layer shows."""
    if device.type != "cpu" or dtype is not torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    probe = nn.Linear(8, 8, bias=False)
    try:
        with torch.inference_mode():
            return torch.allclose(PackedLinear(probe)(torch.ones(2, 8)), probe(torch.ones(2, 8)), rtol=1e-5, atol=1e-6)
    except (AttributeError, RuntimeError):
        return False


def pack_linears(model: nn.Module) -> int:
    """Replaces every nn.Linear of `model`. Returns their number."""
    places = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    for module, name, child in places:
        setattr(module, name, PackedLinear(child))
    return len(places)
