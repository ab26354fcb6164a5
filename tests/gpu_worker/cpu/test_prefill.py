"""The C++ kernel of prompt chunks against a plain softmax in float64, for every instruction set of this machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.attention.layers import AttentionKind, AttentionLayer, AttentionPattern, LayerMap
from gpu_worker.attention.paged import InPlaceKernel
from gpu_worker.cpu.attention import PrefillKernel, Tiles
from gpu_worker.cpu.gathered import GatheredPrefill
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.reference import plain_attention

TILE = 64
# Largest errors in units of the dtype's precision: sums of some hundred products of numbers near 1.
TOLERANCE = {torch.float32: 32, torch.bfloat16: 2, torch.float16: 2}


def kind_of(heads: int = 4, kv_heads: int = 2, key_dim: int = 32, value_dim: int = 32, **more: object) -> AttentionKind:
    softcap = more.pop("softcap", None)
    return AttentionKind(
        num_heads=heads,
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
    """Chunks over a pool in which everything is NaN except the chunks' own positions and the padding of their heads."""

    def __init__(self, kind: AttentionKind, chunks: Sequence[Chunk], page_size: int, dtype: torch.dtype) -> None:
        self.kind, self.chunks = kind, chunks
        generator, order = torch.Generator().manual_seed(0), np.random.default_rng(0)
        num_pages = [-(-(chunk.start + chunk.count) // page_size) for chunk in chunks]
        pages = np.split(order.permutation(np.arange(1, sum(num_pages) + 1)), np.cumsum(num_pages)[:-1])
        shape = kind.num_kv_heads, (sum(num_pages) + 2) * page_size, kind.head_dim
        self.keys, self.values = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        self.table = torch.full((len(chunks) + 1, max(num_pages)), -(1 << 20), dtype=torch.int32)
        # Token slots of each chunk's positions.
        self.slots: list[Tensor] = []
        for i, chunk in enumerate(chunks):
            own = pages[i if chunk.of is None else chunk.of][: num_pages[i]]
            self.table[i, : own.size] = torch.from_numpy(own.astype(np.int32))
            position = torch.arange(chunk.start + chunk.count)
            self.slots.append(torch.from_numpy(own)[position // page_size] * page_size + position % page_size)
            if chunk.of is None:
                for pool, dim in ((self.keys, kind.key_dim), (self.values, kind.value_dim)):
                    pool[:, self.slots[i]] = 0
                    new = torch.randn(shape[0], position.numel(), dim, generator=generator)
                    pool[:, self.slots[i], :dim] = new.to(dtype)
        num = sum(chunk.count for chunk in chunks)
        # As the model leaves them: heads before tokens.
        queries = torch.randn(kind.num_heads, num, kind.key_dim, generator=generator).to(dtype)
        self.query = queries.transpose(0, 1)
        has_sinks = kind.pattern.has_learned_sinks
        self.sinks = torch.randn(kind.num_heads, generator=generator).to(dtype) if has_sinks else None
        self.page_size = page_size

    def computed(self, library: NativeLibrary | None) -> Tensor:
        """What the kernel writes, [T, H, value dimension]; without a library that of torch's operators."""
        positions = [
            torch.nn.functional.pad(torch.arange(c.start, c.start + c.count), (0, -c.count % TILE), value=-1)
            for c in self.chunks
        ]
        lines = [torch.full((each.numel() // TILE,), i) for i, each in enumerate(positions)]
        # Two idle tiles, as in a step that does not use its whole budget.
        idle = torch.full((2 * TILE,), -1)
        tiles = torch.cat([*lines, torch.zeros(2, dtype=torch.int64)]), torch.cat([*positions, idle])
        kernel: InPlaceKernel
        if library is None:
            layers = LayerMap(layers=(AttentionLayer(name="attention", kind=self.kind),))
            gathered = GatheredPrefill(layers, self.table, page_size=self.page_size)
            gathered.update(*tiles)
            [kernel] = gathered.kernels
        else:
            kernel = PrefillKernel(library, self.kind, self.table, page_size=self.page_size, dtype=self.keys.dtype)
            kernel.set_tiles(Tiles.of(*tiles))
        # Outputs may be a part of a larger tensor.
        whole = torch.full((len(self.query) + 2, self.kind.num_heads, self.kind.value_dim), 7.0, dtype=self.keys.dtype)
        kernel(self.query, self.keys, self.values, self.sinks, whole[1:-1])
        assert bool((whole[[0, -1]] == 7).all()), "the kernel wrote outside of its outputs"
        return whole[1:-1]

    def expected(self) -> Tensor:
        """The same in float64, by a softmax over each chunk's gathered keys and values."""
        begin, parts = 0, []
        for chunk, slots in zip(self.chunks, self.slots, strict=True):
            own, begin = self.query[begin : begin + chunk.count], begin + chunk.count
            of_query = torch.arange(chunk.start, chunk.start + chunk.count)[:, None]
            position, pattern = torch.arange(len(slots)), self.kind.pattern
            visible = position <= of_query
            if pattern.window is not None:
                visible &= (position > of_query - pattern.window) | (position < pattern.sink_tokens)
            key, value = self.keys[:, slots, : self.kind.key_dim], self.values[:, slots, : self.kind.value_dim]
            out = plain_attention(
                own.transpose(0, 1).double(),
                key.double(),
                value.double(),
                visible,
                self.kind.scale,
                softcap=self.kind.softcap,
                sinks=self.sinks,
            )
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


def assert_close(step: Step, library: NativeLibrary | None) -> None:
    found, expected = step.computed(library), step.expected()
    error = (found.double() - expected).abs().max().item()
    assert error <= TOLERANCE[found.dtype] * torch.finfo(found.dtype).eps, f"page size {step.page_size}: {error}"


KINDS = [
    kind_of(),
    kind_of(8, 8),
    kind_of(8, 1),
    kind_of(6, 2, 40, 24),
    kind_of(2, 1, 192, 128),
    kind_of(2, 2, 256, 256),
    kind_of(70, 1, 16, 16),
    kind_of(softcap=2.0),
    kind_of(has_learned_sinks=True),
    kind_of(window=1),
    kind_of(window=37),
    kind_of(window=100, has_learned_sinks=True),
    kind_of(window=100, sink_tokens=5),
    kind_of(window=20, sink_tokens=70),
    kind_of(3, 1, 24, 16, softcap=2.0, window=9, sink_tokens=17, has_learned_sinks=True),
]
# A whole prompt; short chunks at the start; chunks that begin and end inside tiles and pages; some queries far on.
CHUNKS = [Chunk(start=at, count=count) for at, count in ((0, 150), (3, 1), (0, 5), (130, 77), (191, 65), (300, 3))]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_visibility_equals_a_softmax_in_float64(
    library: NativeLibrary, kind: AttentionKind, dtype: torch.dtype
) -> None:
    for page_size in (16, 128):
        assert_close(Step(kind, CHUNKS, page_size, dtype), library)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_chunks_that_share_pages_of_a_prefix(library: NativeLibrary, page_size: int) -> None:
    chunks = [Chunk(start=100, count=90), Chunk(start=40, count=10, of=0), Chunk(start=128, count=33, of=0)]
    for dtype in (torch.float32, torch.bfloat16):
        assert_close(Step(kind_of(), chunks, page_size, dtype), library)


@pytest.mark.parametrize("count", [*range(1, 20), 31, 33, 47, 63])
def test_every_number_of_queries(library: NativeLibrary, count: int) -> None:
    for kind in (kind_of(2, 2), kind_of(6, 2)):
        assert_close(Step(kind, [Chunk(start=70, count=count)], 64, torch.float32), library)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_reaches_exactly_the_queries_that_see_it(library: NativeLibrary, dtype: torch.dtype, where: str) -> None:
    for pattern, last in ((AttentionPattern(), 199), (AttentionPattern(window=50, sink_tokens=3), 149)):
        kind = AttentionKind(num_heads=4, num_kv_heads=2, key_dim=32, value_dim=32, scale=0.2, pattern=pattern)
        for page_size in (16, 128):
            step = Step(kind, [Chunk(start=60, count=140)], page_size, dtype)
            expected = step.expected()
            # In the second KV head, which query heads 2 and 3 read.
            getattr(step, where)[1, step.slots[0][100], 7] = torch.nan
            found = step.computed(library)
            sees = torch.zeros(140, 4, dtype=torch.bool)
            sees[100 - 60 : last + 1 - 60, 2:] = True
            assert torch.equal(found.isnan().any(-1), sees)
            error = (found.double() - expected)[~sees].abs().max().item()
            assert error <= TOLERANCE[dtype] * torch.finfo(dtype).eps


def test_large_scores_do_not_overflow(library: NativeLibrary) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(kind_of(), [Chunk(start=10, count=100)], 64, dtype)
        step.query *= 300
        found = step.computed(library)
        # The weights of such scores have the precision of the scores, which are up to 10,000 here.
        assert bool(found.isfinite().all())
        assert (found.double() - step.expected()).abs().max().item() < 0.02


def test_bits_depend_on_neither_threads_nor_other_chunks(library: NativeLibrary) -> None:
    chunks = [Chunk(start=130, count=77), Chunk(start=0, count=64), Chunk(start=0, count=200)]
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(kind_of(6, 2), chunks, 16, dtype)
        together = step.computed(library)
        torch.set_num_threads(3)
        try:
            assert torch.equal(step.computed(library), together)
        finally:
            torch.set_num_threads(1)
        query, begin = step.query, 0
        for i, chunk in enumerate(chunks):
            step.chunks, step.query = chunks[i : i + 1], query[begin : begin + chunk.count]
            table, step.table = step.table, step.table[i:]
            assert torch.equal(step.computed(library), together[begin : begin + chunk.count])
            step.table, begin = table, begin + chunk.count
