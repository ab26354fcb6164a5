"""Steps of attention on a CPU over a pool of NaN, and the same in float64.

The pool is NaN except at the positions that a query sees, and in the padding of their heads. Entries of the page table
that belong to no sequence, or come after its last page, name no page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from gpu_worker.attention.paged import InPlaceKernel
from gpu_worker.cpu.attention import DecodeKernel, PrefillKernel, Tiles
from gpu_worker.cpu.gathered import GatheredDecode, GatheredPrefill
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.attention.small_layers import layers_of
from tests.gpu_worker.reference import plain_attention

TILE = 64
# Largest errors in units of the dtype's precision: sums of some hundred products of numbers near 1.
TOLERANCE = {torch.float32: 32, torch.bfloat16: 2, torch.float16: 2}


def kind_of(group: int = 2, kv_heads: int = 2, key_dim: int = 32, value_dim: int = 32, **more: object) -> AttentionKind:
    softcap = more.pop("softcap", None)
    return AttentionKind(
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=key_dim**-0.5,
        softcap=softcap,
        pattern=AttentionPattern(**more),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Queries at positions start to start + count - 1, of a sequence of its own unless `of` names another chunk's."""

    start: int
    count: int
    of: int | None = None


class Step:
    """Chunks of prompts."""

    def __init__(self, kind: AttentionKind, chunks: Sequence[Chunk], page_size: int, dtype: torch.dtype) -> None:
        self.kind, self.chunks, self.page_size = kind, chunks, page_size
        draw = torch.Generator().manual_seed(0)
        num_pages = [-(-(chunk.start + chunk.count) // page_size) for chunk in chunks]
        pages = (torch.randperm(sum(num_pages), generator=draw) + 1).split(num_pages)
        shape = kind.num_kv_heads, (sum(num_pages) + 2) * page_size, kind.head_dim
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        self.lines = torch.randperm(len(chunks) + 3, generator=draw)[: len(chunks)]
        self.table = torch.full((len(chunks) + 3, max(num_pages) + 1), -(1 << 20), dtype=torch.int32)
        # Token slots of the positions of each chunk's sequence, up to its last query.
        self.slots: list[Tensor] = []
        for i, chunk in enumerate(chunks):
            own = pages[i if chunk.of is None else chunk.of][: num_pages[i]]
            self.table[self.lines[i], : own.numel()] = own.int()
            position = torch.arange(chunk.start + chunk.count)
            self.slots.append(own[position // page_size] * page_size + position % page_size)
            if chunk.of is None:
                seen = self.slots[i][self._visible(chunk).any(0)]
                for pool, dim in ((self.keys, kind.key_dim), (self.values, kind.value_dim)):
                    pool[:, seen] = 0
                    pool[:, seen, :dim] = torch.randn(shape[0], seen.numel(), dim, generator=draw).to(dtype)
        # As the model leaves them: heads before tokens, a part of a larger tensor.
        num = sum(chunk.count for chunk in chunks)
        queries = torch.randn(kind.num_heads, num, kind.key_dim + 8, generator=draw).to(dtype)
        self.query = queries[..., : kind.key_dim].transpose(0, 1)
        has_sinks = kind.pattern.has_learned_sinks
        self.sinks = torch.randn(kind.num_heads, generator=draw).to(dtype) if has_sinks else None

    def _visible(self, chunk: Chunk) -> Tensor:
        """bool [queries, positions]."""
        query = torch.arange(chunk.start, chunk.start + chunk.count)[:, None]
        position, pattern = torch.arange(chunk.start + chunk.count), self.kind.pattern
        if pattern.window is None:
            return position <= query
        return (position <= query) & ((position > query - pattern.window) | (position < pattern.sink_tokens))

    def computed(self, library: NativeLibrary | None, only: slice = slice(None)) -> Tensor:
        """What the kernel writes for `only` these chunks, [T, H, value dimension]; without a library that of torch's
        operators."""
        chunks = self.chunks[only]
        begin = sum(chunk.count for chunk in self.chunks[: only.start or 0])
        query = self.query[begin : begin + sum(chunk.count for chunk in chunks)]
        kernel = self.kernel(library, chunks, self.lines[only])
        # Outputs may be a part of a larger tensor.
        whole = torch.full((len(query) + 2, self.kind.num_heads, self.kind.value_dim), 7.0, dtype=self.keys.dtype)
        kernel(query, self.keys, self.values, self.sinks, whole[1:-1])
        assert bool((whole[[0, -1]] == 7).all()), "the kernel wrote outside of its outputs"
        return whole[1:-1]

    def kernel(self, library: NativeLibrary | None, chunks: Sequence[Chunk], lines: Tensor) -> InPlaceKernel:
        """The kernel, set to these chunks and two idle tiles, as in a step that does not use its whole budget."""
        positions = [
            torch.nn.functional.pad(torch.arange(c.start, c.start + c.count), (0, -c.count % TILE), value=-1)
            for c in chunks
        ]
        of_tile = [line.expand(each.numel() // TILE) for line, each in zip(lines, positions, strict=True)]
        idle = torch.full((2 * TILE,), -1)
        tiles = torch.cat([*of_tile, torch.zeros(2, dtype=torch.int64)]), torch.cat([*positions, idle])
        if library is None:
            gathered = GatheredPrefill(layers_of(self.kind), self.table, page_size=self.page_size)
            gathered.update(*tiles)
            return gathered.kernels[0]
        kernel = PrefillKernel(library, self.kind, self.table, page_size=self.page_size, dtype=self.keys.dtype)
        kernel.set_tiles(Tiles.of(*tiles))
        return kernel

    def expected(self) -> Tensor:
        """The same in float64, by a softmax over each chunk's gathered keys and values."""
        parts: list[Tensor] = []
        queries = self.query.double().split([chunk.count for chunk in self.chunks])
        for chunk, slots, query in zip(self.chunks, self.slots, queries, strict=True):
            visible = self._visible(chunk)
            seen = slots[visible.any(0)]
            out = plain_attention(
                query.transpose(0, 1),
                self.keys[:, seen, : self.kind.key_dim].double(),
                self.values[:, seen, : self.kind.value_dim].double(),
                visible[:, visible.any(0)],
                self.kind.scale,
                softcap=self.kind.softcap,
                sinks=self.sinks,
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


class Rows(Step):
    """Decode rows of sequences of these lengths: a query of each, at the last position."""

    def __init__(self, kind: AttentionKind, lengths: Sequence[int], page_size: int, dtype: torch.dtype) -> None:
        super().__init__(kind, [Chunk(start=length - 1, count=1) for length in lengths], page_size, dtype)
        self.positions = torch.tensor(lengths) - 1

    def kernel(self, library: NativeLibrary | None, chunks: Sequence[Chunk], lines: Tensor) -> InPlaceKernel:
        rows = lines.clone(), torch.tensor([chunk.start for chunk in chunks])
        if library is None:
            gathered = GatheredDecode(layers_of(self.kind), self.table, page_size=self.page_size)
            gathered.update(*rows)
            return gathered.kernels[0]
        kernel = DecodeKernel(library, self.kind, self.table, page_size=self.page_size, dtype=self.keys.dtype)
        kernel.set_rows(*rows)
        return kernel


def assert_close(step: Step, library: NativeLibrary | None) -> None:
    found, expected = step.computed(library), step.expected()
    error = (found.double() - expected).abs().max().item()
    assert error <= TOLERANCE[found.dtype] * torch.finfo(found.dtype).eps, f"page size {step.page_size}: {error}"
