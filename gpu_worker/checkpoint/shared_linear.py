"""Linear layers of which a rank holds a part, as plain layers of that part and a collective call where one is due.

Transformers loads them with parameters that know of all ranks (DTensor) and replaces their forwards by its own, which
unwrap the parameters at every call. Plain layers cost nothing beside the product and the call, and can be merged and
packed as those of one process. The styles are Transformers': the names say how the parameters lie. A layer with another
style, or whose parameters lie otherwise, stays as it was loaded.

Shape legend: T tokens, I and O features of input and output, n ranks.
"""

import re
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ROWS, _COLUMNS, _WHOLE = (Shard(0),), (Shard(1),), (Replicate(),)


class SummedLinear(nn.Module):
    """y [.., T, O] = sum over the ranks of x W^T, plus b; x [.., T, I / n] and W [O, I / n] are this rank's parts."""

    def __init__(self, part: nn.Linear, bias: Tensor | None, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        # Packing finds the layer here, and may replace it.
        self.part: nn.Module = part
        self.in_features, self.out_features = part.in_features, part.out_features
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        """This rank's part of W."""
        return self.part.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        dist.all_reduce(y, group=self._ranks)
        return y if self.bias is None else y.add_(self.bias)


class GatheredLinear(nn.Module):
    """y [.., T, O] = x W^T + b; W [O / n, I] and b are this rank's parts, equally large on all ranks."""

    def __init__(self, part: nn.Linear, ranks: dist.ProcessGroup) -> None:
        super().__init__()
        self.part: nn.Module = part
        self._ranks, self._num_ranks = ranks, dist.get_world_size(ranks)
        self.in_features, self.out_features = part.in_features, part.out_features * self._num_ranks

    @property
    def weight(self) -> Tensor:
        """This rank's part of W."""
        return self.part.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x).contiguous()
        # [n, .., T, O / n], flat in its first two dimensions for the call.
        parts = y.new_empty((self._num_ranks, *y.shape))
        dist.all_gather_into_tensor(parts.view(-1, *y.shape[1:]), y, group=self._ranks)
        return parts.movedim(0, -2).flatten(-2)


def plain_linears(model: PreTrainedModel) -> int:
    """Replaces the linear layers whose style is known, one by one. Returns their number."""
    makers: dict[str, Callable[[nn.Linear], nn.Module | None]] = {
        "colwise": _column_part,
        "rowwise": _summed,
        "colwise_gather_output": _gathered,
        "replicate": _whole,
    }
    styles: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    count = 0
    for name, module in list(model.named_modules()):
        make = makers.get(styles.get(_NUMBER.sub("*", name), ""))
        if make is None or type(module) is not nn.Linear:
            continue
        plain = make(module)
        if plain is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
            count += 1
    return count


def _column_part(linear: nn.Linear) -> nn.Linear | None:
    return _plain(linear) if _lies(linear.weight, _ROWS) and _lies(linear.bias, _ROWS) else None


def _whole(linear: nn.Linear) -> nn.Linear | None:
    return None if isinstance(linear.weight, DTensor) else _plain(linear)


def _summed(linear: nn.Linear) -> SummedLinear | None:
    if not _lies(linear.weight, _COLUMNS) or not _lies(linear.bias, _WHOLE):
        return None
    bias = None if linear.bias is None else _local(linear.bias)
    return SummedLinear(_plain(linear, has_bias=False), bias, _ranks_of(linear))


def _gathered(linear: nn.Linear) -> GatheredLinear | None:
    ranks = _ranks_of(linear) if _lies(linear.weight, _ROWS) and _lies(linear.bias, _ROWS) else None
    if ranks is None or linear.weight.shape[0] % dist.get_world_size(ranks):
        return None
    return GatheredLinear(_plain(linear), ranks)


def _lies(parameter: Tensor | None, placements: tuple[Shard | Replicate, ...]) -> bool:
    """Whether the ranks hold the parameter so. True without one."""
    return parameter is None or (isinstance(parameter, DTensor) and tuple(parameter.placements) == placements)


def _plain(linear: nn.Linear, *, has_bias: bool = True) -> nn.Linear:
    """A layer with this rank's part of the parameters, which it shares with `linear`."""
    weight = _local(linear.weight)
    bias = _local(linear.bias) if has_bias and linear.bias is not None else None
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    out.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        out.bias = nn.Parameter(bias, requires_grad=False)
    return out.eval()


def _local(parameter: Tensor) -> Tensor:
    found = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return found.detach()


def _ranks_of(linear: nn.Linear) -> dist.ProcessGroup:
    assert isinstance(linear.weight, DTensor)
    return linear.weight.device_mesh.get_group()
