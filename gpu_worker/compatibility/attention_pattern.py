"""Reads an attention pattern, causal or causal within a window, from a mask function of Transformers.

Owns the evaluation of mask functions. Knows nothing of models or kernels.
"""

import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionPattern
from gpu_worker.compatibility.probe import MaskFunction

# Below this position every pair is evaluated, elsewhere selected whole rows.
_DENSE = 96


class UnreadableMask(ValueError):
    """The mask is neither causal nor a causal window; the message names the difference."""


def read_pattern(mask: MaskFunction, *, num_heads: int, length: int) -> AttentionPattern:
    """The pattern of `mask` for a sequence of `length` tokens. Raises UnreadableMask."""
    length = max(length, 2)
    last = torch.tensor([length - 1])
    everything = torch.arange(length)
    row = _evaluate(mask, last, everything, 1)[0, 0]
    if not bool(row[-1]):
        raise UnreadableMask("a token does not see itself")
    seen = int(row.sum())
    if not bool(row[length - seen :].all()):
        raise UnreadableMask("the positions that a token sees have gaps")
    window = seen if seen < length else None
    edges = {0, 1, length // 2, length - 2, length - 1, *(range(seen - 2, seen + 3) if window else ())}
    rows = torch.tensor(sorted(q for q in edges if 0 <= q < length))
    _compare(mask, rows, everything, window, 1)
    dense = everything[:_DENSE]
    _compare(mask, dense, dense, window, num_heads)
    return AttentionPattern(window=window)


def _compare(mask: MaskFunction, queries: Tensor, keys: Tensor, window: int | None, num_heads: int) -> None:
    seen = _evaluate(mask, queries, keys, num_heads)
    q, k = queries[:, None], keys[None, :]
    if bool((seen & (k > q)).any()):
        raise UnreadableMask("tokens see later tokens (bidirectional attention)")
    expected = k <= q
    if window is not None:
        expected = expected & (k > q - window)
    if not torch.equal(seen, expected.expand_as(seen)):
        head, query, key = (seen != expected).nonzero()[0].tolist()
        sees = "sees" if bool(seen[head, query, key]) else "does not see"
        among = f" in head {head}" if num_heads > 1 else ""
        usual = "causal attention" if window is None else f"a window of {window}"
        place = f"position {int(queries[query])} {sees} position {int(keys[key])}{among}"
        raise UnreadableMask(f"{place}, which differs from {usual}")


def _evaluate(mask: MaskFunction, queries: Tensor, keys: Tensor, num_heads: int) -> Tensor:
    """bool [heads, queries, keys]."""
    batch, heads = torch.zeros((), dtype=torch.int64), torch.arange(num_heads)[:, None, None]
    try:
        seen = mask(batch, heads, queries[None, :, None], keys[None, None, :])
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise UnreadableMask(_kind_of(mask)) from error
    if not isinstance(seen, Tensor):
        seen = torch.tensor(bool(seen))
    if seen.is_meta:
        raise UnreadableMask(_kind_of(mask))
    return seen.broadcast_to(num_heads, queries.shape[0], keys.shape[0]).bool()


def _kind_of(mask: MaskFunction) -> str:
    """Describes a mask that cannot be evaluated without data, by the names of the functions that it combines."""
    names, waiting = set[str](), [mask]
    while waiting:
        function = waiting.pop()
        names.add(function.__qualname__)
        for cell in function.__closure__ or ():
            parts = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
            waiting.extend(part for part in parts if hasattr(part, "__closure__"))
    if any(name.startswith("chunked") for name in names):
        return "tokens attend within chunks"
    if any(name.startswith("blockwise") for name in names):
        return "blocks of tokens see each other both ways"
    return "it depends on data"
