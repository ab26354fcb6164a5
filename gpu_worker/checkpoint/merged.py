"""Merges linear layers that receive the same tensor, such as those of queries, keys and values, into one product.

Owns the replacement. The first layer of a group computes the product of all and keeps it; each later one returns its
part if it is called with the same tensor, and the last one drops the product. A layer that is called with another
tensor computes its own part. Changing that tensor in place between the calls would not be noticed; the groups come from
a run of the model, and its self-check would fail. Knows nothing of models.
"""

from typing import TypeGuard

import torch
from torch import Tensor, nn

# Names of linear layers, by group.
Groups = tuple[tuple[str, ...], ...]


class _Product:
    """The product of a merged weight with one input, while its parts are read."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        # The group's first layer, which has the merged weight.
        self.first: MergedLinear
        self.input: Tensor | None = None
        self.output: Tensor | None = None


class MergedLinear(nn.Module):
    """One layer of a group: y = x W^T + b for its part of the merged W and b."""

    def __init__(self, product: _Product, idx: int, merged: nn.Linear) -> None:
        super().__init__()
        self._product = product
        self._is_first, self._is_last = idx == 0, idx == len(product.sizes) - 1
        self._begin = sum(product.sizes[:idx])
        self.in_features, self.out_features = merged.in_features, product.sizes[idx]
        if self._is_first:
            # Casts, parameters and packing find the merged layer here, and may replace it.
            self.merged = merged
            product.first = self

    @property
    def whole(self) -> nn.Module:
        """The layer that has the merged W and b."""
        return self._product.first.merged

    @property
    def begin(self) -> int:
        """The first row of W that is this layer's."""
        return self._begin

    @property
    def weight(self) -> Tensor:
        """This layer's part of W."""
        weight: Tensor = self._product.first.merged.weight
        return weight[self._begin : self._begin + self.out_features]

    @property
    def bias(self) -> Tensor | None:
        """This layer's part of b."""
        bias: Tensor | None = self._product.first.merged.bias
        return None if bias is None else bias[self._begin : self._begin + self.out_features]

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
        return output[..., self._begin : self._begin + self.out_features]


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module is an nn.Linear with the class's own forward."""
    return type(module) is nn.Linear and "forward" not in vars(module)


@torch.no_grad()
def merge_linears(model: nn.Module, groups: Groups) -> int:
    """Merges each group of layers, given by name; a name that is not a plain linear layer leaves its group as it is.

    Returns the number of merged groups. Each group's own weights are freed before the next group is merged.
    """
    count = 0
    for names in groups:
        linears = [module for name in names if is_plain_linear(module := model.get_submodule(name))]
        if len(linears) == len(names):
            merged, product = _merged(linears), _Product([linear.out_features for linear in linears])
            for idx, name in enumerate(names):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, MergedLinear(product, idx, merged))
            count += 1
    return count


def _merged(linears: list[nn.Linear]) -> nn.Linear:
    """One layer with the weights of all, one after another."""
    weights = [linear.weight for linear in linears]
    out = nn.Linear(1, 1, bias=linears[0].bias is not None, device="meta")
    out.in_features, out.out_features = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
    out.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    if linears[0].bias is not None:
        out.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return out.eval()
