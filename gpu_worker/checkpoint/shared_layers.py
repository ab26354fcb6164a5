"""Layers of which a rank holds a part, as plain layers of that part and a collective call where one is due.

Transformers' own forwards unwrap the parameters (DTensor) at every call; plain linear layers cost nothing beside the
product, and can be merged and packed. The styles are Transformers': the names say how the parameters lie. A layer with
another style, or with parameters that lie otherwise, stays as it was loaded.

Shape legend: T tokens, I and O features of input and output, n ranks.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from gpu_worker.checkpoint.linear import linear_of
from gpu_worker.checkpoint.loading import NUMBER, own_part

# The name of the call since torch 2.13, and before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_ROWS, _COLUMNS, _WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


class _OfRank(nn.Module):
    """A layer of which `part` is this rank's."""

    def __init__(self, part: nn.Linear, out_features: int, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        # Packing finds the layer here, and may replace it.
        self.part: nn.Module = part
        self.in_features, self.out_features, self._ranks = part.in_features, out_features, ranks

    @property
    def weight(self) -> Tensor:
        return self.part.weight  # type: ignore[return-value]


class SummedLinear(_OfRank):
    """y [.., T, O] = sum over the ranks of x W^T, plus b; x [.., T, I / n] and W [O, I / n] are this rank's parts."""

    def __init__(self, part: nn.Linear, bias: Tensor | None, ranks: dist.ProcessGroup) -> None:
        super().__init__(part, part.out_features, ranks)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        dist.all_reduce(y, group=self._ranks)
        return y if self.bias is None else y.add_(self.bias)


class GatheredLinear(_OfRank):
    """y [.., T, O] = x W^T + b; W [P, I] and b are this rank's parts, P = ceil(O / n) or less on the last ranks."""

    def __init__(self, part: nn.Linear, out_features: int, ranks: dist.ProcessGroup) -> None:
        super().__init__(part, out_features, ranks)
        self._num_ranks = dist.get_world_size(ranks)
        self._width = -(-out_features // self._num_ranks)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        if y.shape[-1] < self._width:
            y = nn.functional.pad(y, (0, self._width - y.shape[-1]))
        # [n, .., T, ceil(O / n)], flat in its first two dimensions for the call.
        parts = y.new_empty((self._num_ranks, *y.shape))
        _gather(parts.view(-1, *y.shape[1:]), y.contiguous(), group=self._ranks)
        return parts.movedim(0, -2).flatten(-2)[..., : self.out_features]


def plain_layers(model: PreTrainedModel) -> int:
    """Replaces the layers of a known style, one by one. Returns their number."""
    styles: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    count = 0
    for name, module in list(model.named_modules()):
        style = styles.get(NUMBER.sub("*", name), "")
        if style == "embedding_rowwise" and isinstance(module, nn.Embedding):
            count += _look_up_rows(module)
        plain = _plain_layer(module, style) if type(module) is nn.Linear else None
        if plain is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
            count += 1
    return count


def _look_up_rows(embedding: nn.Embedding) -> bool:
    """Lets the embedding look up this rank's rows; False if its parameter lies otherwise."""
    if not _lies(embedding.weight, _ROWS):
        return False
    ranks, whole = _ranks_of(embedding), embedding.weight.shape[0]
    # As torch.chunk, all parts but the last are equally large.
    begin = min(dist.get_rank(ranks) * -(-whole // dist.get_world_size(ranks)), whole)
    embedding.weight = nn.Parameter(_local(embedding.weight), requires_grad=False)
    # It names a row of the whole, and matters to gradients only.
    embedding.padding_idx = None
    own, end = type(embedding).forward, begin + embedding.weight.shape[0]

    def forward(tokens: Tensor) -> Tensor:
        """tokens int64 [.., T] → [.., T, O]: rows of other ranks are zero, and the sum is whole."""
        is_elsewhere = (tokens < begin) | (tokens >= end)
        # The class's own forward computes the rows, because some scale them.
        rows = own(embedding, (tokens - begin).masked_fill(is_elsewhere, 0))
        rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        dist.all_reduce(rows, group=ranks)
        return rows

    embedding.forward = forward  # type: ignore[method-assign]
    return True


def _plain_layer(linear: nn.Linear, style: str) -> nn.Module | None:
    """The plain layer of a style; None for an unknown one, and if the parameters lie otherwise."""
    is_by_rows = _lies(linear.weight, _ROWS) and _lies(linear.bias, _ROWS)
    if style == "colwise" and is_by_rows:
        return _part(linear)
    if style == "colwise_gather_output" and is_by_rows:
        return GatheredLinear(_part(linear), linear.weight.shape[0], _ranks_of(linear))
    if style == "rowwise" and _lies(linear.weight, _COLUMNS) and _lies(linear.bias, _WHOLE):
        bias = None if linear.bias is None else _local(linear.bias)
        return SummedLinear(linear_of(_local(linear.weight), None), bias, _ranks_of(linear))
    if style == "replicate" and not isinstance(linear.weight, DTensor):
        return _part(linear)
    return None


def _lies(parameter: Tensor | None, placements: tuple[Shard | Replicate, ...]) -> bool:
    """Whether the ranks hold the parameter so. True without one."""
    return parameter is None or (isinstance(parameter, DTensor) and tuple(parameter.placements) == placements)


def _part(linear: nn.Linear) -> nn.Linear:
    """A layer with this rank's part of the parameters, which it shares with `linear`."""
    return linear_of(_local(linear.weight), None if linear.bias is None else _local(linear.bias))


def _local(parameter: Tensor) -> Tensor:
    return own_part(parameter).detach()


def _ranks_of(layer: nn.Linear | nn.Embedding) -> dist.ProcessGroup:
    assert isinstance(layer.weight, DTensor)
    return layer.weight.device_mesh.get_group()
