"""Attention on a CPU by torch's operators, for what no C++ kernel computes: it needs no compiler.

The keys and values that a decode row or a chunk sees are gathered from their pages, and a softmax over them follows, in
float32 at least. Each row and each chunk is computed alone: its bits do not depend on others. Knows nothing of plans.

Shape legend: T packed tokens, H query heads, K KV heads, G query heads per KV head, D head dimension in the pool, N the
pool's token slots, Q queries of a chunk, S the positions that they see.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionKind, AttentionPattern, LayerMap
from gpu_worker.cpu.attention import Tiles

# Queries of a chunk that are computed together, and the most elements of their scores, keys and values at a time.
# Twice as many fell out of caches, and took up to five times as long.
_BLOCK = 64
_MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """Consecutive queries of one sequence, and what layers of one pattern see of it."""

    # The place of the first query among the part's tokens, and the number of queries.
    token: int
    count: int
    # int64 [S]: the token slots of all positions that some query sees, ascending; the queries' own are the last.
    slots: Tensor
    # bool [Q, S]: what a query does not see of them. None for a single query, which sees all.
    hidden: Tensor | None


class _Gathered:
    """The kernels of a model's layers, for one part of steps."""

    def __init__(self, layers: LayerMap, table: Tensor, *, page_size: int) -> None:
        """table: the page table, int32 [lines, width], with pages in logical order; kept by reference."""
        self.kernels, self._table, self._page_size = layers.by_layer(GatheredKernel), table, page_size

    def _set(self, chunks: list[tuple[int, int, int, int]]) -> None:
        """chunks: the first token, the line of the table, the first position and the number of queries of each."""
        of_pattern: dict[AttentionPattern, list[_Chunk]] = {}
        for kernel in dict.fromkeys(self.kernels):
            pattern = kernel.kind.pattern
            if pattern not in of_pattern:
                of_pattern[pattern] = [self._chunk(pattern, *chunk) for chunk in chunks]
            kernel.chunks = of_pattern[pattern]

    def _chunk(self, pattern: AttentionPattern, token: int, line: int, start: int, count: int) -> _Chunk:
        position, query = torch.arange(start + count), torch.arange(start, start + count)[:, None]
        hidden = position > query
        if pattern.window is not None:
            hidden |= (position <= query - pattern.window) & (position >= pattern.sink_tokens)
            seen_by_some = ~hidden.all(0)
            position, hidden = position[seen_by_some], hidden[:, seen_by_some]
        pages = self._table[line].index_select(0, position // self._page_size).long()
        return _Chunk(
            token=token,
            count=count,
            slots=pages * self._page_size + position % self._page_size,
            hidden=hidden if count > 1 else None,
        )


class GatheredDecode(_Gathered):
    """The kernels of decode rows."""

    def update(self, lines: Tensor, positions: Tensor) -> None:
        """Sets the rows of a step: the line of the page table and the query's position of each, int64 [rows]."""
        rows = zip(lines.tolist(), positions.tolist(), strict=True)
        self._set([(token, line, position, 1) for token, (line, position) in enumerate(rows)])


class GatheredPrefill(_Gathered):
    """The kernels of prompt chunks."""

    def update(self, lines: Tensor, q_positions: Tensor) -> None:
        """Sets the chunks of a step; the arguments are those of `Tiles.of`."""
        tiles = Tiles.of(lines, q_positions)
        chunks: list[tuple[int, int, int, int]] = []
        arrays = (tiles.tokens, tiles.lines, tiles.starts, tiles.counts)
        for token, line, start, count in zip(*(array.tolist() for array in arrays), strict=True):
            # The tiles of a chunk follow each other.
            if chunks and chunks[-1][1] == line and sum(chunks[-1][2:]) == start:
                chunks[-1] = (*chunks[-1][:3], chunks[-1][3] + count)
            else:
                chunks.append((token, line, start, count))
        self._set(chunks)


class GatheredKernel:
    """The kernel for layers of one kind."""

    def __init__(self, kind: AttentionKind) -> None:
        self.kind = kind
        self.chunks: list[_Chunk] = []

    def __call__(self, query_THD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_THD: Tensor) -> None:
        kind = self.kind
        if sinks is not None:
            sinks = sinks.view(kind.num_kv_heads, kind.group, 1, 1)
        for chunk in self.chunks:
            tokens = slice(chunk.token, chunk.token + chunk.count)
            query = query_THD[tokens].unflatten(1, (kind.num_kv_heads, kind.group))
            out = out_THD[tokens].unflatten(1, (kind.num_kv_heads, kind.group))
            for heads in self._heads(chunk):
                sinks_of_heads = None if sinks is None else sinks[heads]
                self._attend(chunk, query[:, heads], key[heads], value[heads], sinks_of_heads, out[:, heads])

    def _heads(self, chunk: _Chunk) -> Iterator[slice]:
        """The KV heads that are computed together."""
        kind = self.kind
        of_one = chunk.slots.shape[0] * (2 * kind.head_dim + kind.group * min(chunk.count, _BLOCK))
        together = max(1, _MOST_ELEMENTS // of_one)
        for first in range(0, kind.num_kv_heads, together):
            yield slice(first, first + together)

    def _attend(
        self, chunk: _Chunk, query_QKGD: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out_QKGD: Tensor
    ) -> None:
        kind, compute = self.kind, torch.promote_types(key.dtype, torch.float32)
        key, value = (
            tensor.index_select(1, chunk.slots)[..., :dim].to(compute)
            for tensor, dim in ((key, kind.key_dim), (value, kind.value_dim))
        )
        for first in range(0, chunk.count, _BLOCK):
            block = slice(first, min(first + _BLOCK, chunk.count))
            # Later positions than those of the block are not seen.
            seen = chunk.slots.shape[0] - (chunk.count - block.stop)
            query = query_QKGD[block].permute(1, 2, 0, 3).to(compute) * kind.scale
            scores = query.flatten(1, 2) @ key[:, :seen].mT
            if kind.softcap is not None:
                scores = scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
            scores = scores.unflatten(1, query.shape[1:3])
            if chunk.hidden is not None:
                scores.masked_fill_(chunk.hidden[block, :seen], -torch.inf)
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                # A learned sink takes part in the softmax and adds nothing.
                sink = sinks.to(compute).expand(*scores.shape[:3], 1)
                weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            out = weights.flatten(1, 2) @ value[:, :seen]
            out_QKGD[block] = out.unflatten(1, query.shape[1:3]).permute(2, 0, 1, 3)
