"""Attention on a CPU against a plain softmax in float64: the C++ kernels for every instruction set of this machine, of
decode rows and of prompt chunks, and torch's operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from gpu_worker.cpu import gathered
from gpu_worker.cpu.attention import KvWriter, NativeDecode
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.cpu.attention_rig import TOLERANCE, Chunk, Rows, Step, assert_close, kind_of

NATIVE = [torch.float32, torch.bfloat16]
# One token; the edges of a tile of 16, of pages and of the parts (512) into which a long row is divided.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 127, 128, 129, 190, 511, 512, 513, 1100)
# A whole prompt; short chunks at the start; chunks that begin and end inside tiles and pages; some queries far on.
CHUNKS = [Chunk(start=at, count=count) for at, count in ((0, 150), (3, 1), (0, 5), (130, 77), (191, 65), (300, 3))]
# Two chunks on the pages of another one.
SHARING = [Chunk(start=100, count=90), Chunk(start=40, count=10, of=0), Chunk(start=128, count=33, of=0)]
PARTS = [64, 1 << 20]
SHAPES = [kind_of(3, 2, 40, 24), kind_of(2, 1, 192, 128), kind_of(1, 2, 256, 256), kind_of(70, 1, 16, 16)]
VISIBILITIES: list[dict[str, Any]] = [
    {"softcap": 2.0},
    {"has_learned_sinks": True},
    {"window": 1},
    {"window": 37},
    {"window": 100, "has_learned_sinks": True},
    {"window": 100, "sink_tokens": 5},
    {"window": 20, "sink_tokens": 70},
]
EVERYTHING = kind_of(3, 1, 24, 16, softcap=2.0, window=9, sink_tokens=17, has_learned_sinks=True)
ROW_KINDS = [
    *(kind_of(group) for group in (1, 2, 3, 4, 5, 7, 8, 16)),
    *SHAPES,
    kind_of(4, 1, 24, 80),
    *(kind_of(group, **more) for group in (2, 4) for more in (*VISIBILITIES, {"softcap": 50.0}, {"window": 600})),
    EVERYTHING,
]
CHUNK_KINDS = [
    *(kind_of(), kind_of(1, 8), kind_of(8, 1)),
    *SHAPES,
    *(kind_of(**more) for more in VISIBILITIES),
    EVERYTHING,
]


def of_rows(kind: AttentionKind, page_size: int, dtype: torch.dtype) -> Step:
    return Rows(kind, LENGTHS, page_size, dtype)


def of_chunks(kind: AttentionKind, page_size: int, dtype: torch.dtype) -> Step:
    return Step(kind, CHUNKS, page_size, dtype)


EVERY = pytest.mark.parametrize(
    ("make", "kind"),
    [*((of_rows, kind) for kind in ROW_KINDS), *((of_chunks, kind) for kind in CHUNK_KINDS)],
    ids=lambda each: str(each) if isinstance(each, AttentionKind) else each.__name__,
)


@EVERY
@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_every_visibility_equals_a_softmax_in_float64(
    library: NativeLibrary, make: Callable[..., Step], kind: AttentionKind, dtype: torch.dtype
) -> None:
    for page_size in (16, 128):
        assert_close(make(kind, page_size, dtype), library)


@pytest.mark.parametrize("make", [of_rows, of_chunks])
def test_sinks_of_another_type_than_the_pool(library: NativeLibrary, make: Callable[..., Step]) -> None:
    step = make(kind_of(has_learned_sinks=True), 16, torch.bfloat16)
    assert step.sinks is not None
    step.sinks = step.sinks.float()
    assert_close(step, library)
    assert_close(step, None)


@EVERY
@pytest.mark.parametrize("dtype", [*NATIVE, torch.float16], ids=str)
def test_every_visibility_by_torchs_operators(
    make: Callable[..., Step], kind: AttentionKind, dtype: torch.dtype
) -> None:
    for page_size in (16, 128):
        assert_close(make(kind, page_size, dtype), None)


@pytest.mark.parametrize("page_size", [32, 64, 256])
def test_every_page_size(library: NativeLibrary, page_size: int) -> None:
    for dtype in NATIVE:
        for group in (1, 4):
            assert_close(Rows(kind_of(group, window=70, sink_tokens=3), LENGTHS, page_size, dtype), library)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_chunks_that_share_pages_of_a_prefix(library: NativeLibrary, page_size: int) -> None:
    for dtype in NATIVE:
        assert_close(Step(kind_of(), SHARING, page_size, dtype), library)
    assert_close(Step(kind_of(), SHARING, page_size, torch.float32), None)


@pytest.mark.parametrize("count", [*range(1, 20), 31, 33, 47, 63])
def test_every_number_of_queries(library: NativeLibrary, count: int) -> None:
    for kind in (kind_of(1, 2), kind_of(3, 2)):
        assert_close(Step(kind, [Chunk(start=70, count=count)], 64, torch.float32), library)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
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


@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_reaches_exactly_the_heads_that_see_it(library: NativeLibrary, where: str) -> None:
    for dtype in NATIVE:
        for group in (1, 4):
            rows = Rows(kind_of(group), (40, 700, 90), 64, dtype)
            expected = rows.expected()
            # In the second KV head of the second row.
            getattr(rows, where)[1, rows.slots[1][300], 7] = torch.nan
            found = rows.computed(library)
            sees = torch.zeros(3, 2 * group, dtype=torch.bool)
            sees[1, group:] = True
            assert torch.equal(found.isnan().any(-1), sees)
            error = (found.double() - expected)[~sees].abs().max().item()
            assert error <= TOLERANCE[dtype] * torch.finfo(dtype).eps


def test_large_scores_do_not_overflow(library: NativeLibrary) -> None:
    for dtype in NATIVE:
        chunk = Step(kind_of(), [Chunk(start=10, count=100)], 64, dtype)
        for step in (Rows(kind_of(4), (100, 600), 64, dtype), chunk):
            step.query *= 300
            found = step.computed(library)
            # The weights of such scores have the precision of the scores, which are up to 10,000 here.
            assert bool(found.isfinite().all())
            assert (found.double() - step.expected()).abs().max().item() < 0.02


def test_scores_of_minus_infinity_have_no_weight(library: NativeLibrary) -> None:
    """Even if they fill the first chunk of a row, where no finite score has come yet."""
    for group in (1, 4):
        rows = Rows(kind_of(group), (700,), 64, torch.float32)
        rows.query = rows.query.abs() + 1
        rows.keys[:, rows.slots[0][:600], :32] = -torch.inf
        error = (rows.computed(library).double() - rows.expected()).abs().max().item()
        assert error <= TOLERANCE[torch.float32] * torch.finfo(torch.float32).eps


def assert_independent(step: Step, library: NativeLibrary | None) -> None:
    """A row or chunk alone has the bits that it has with others."""
    together = step.computed(library)
    for i, part in enumerate(together.split([chunk.count for chunk in step.chunks])):
        assert torch.equal(step.computed(library, slice(i, i + 1)), part)


def test_bits_depend_on_neither_threads_nor_other_rows_and_chunks(library: NativeLibrary) -> None:
    chunks = [Chunk(start=130, count=77), Chunk(start=0, count=64), Chunk(start=0, count=200)]
    slides = kind_of(4, window=600, sink_tokens=20)
    for dtype in NATIVE:
        rows = [Rows(kind, (1100, 40, 513), 16, dtype) for kind in (kind_of(2), slides)]
        for step in (*rows, Step(kind_of(3, 2), chunks, 16, dtype)):
            together = step.computed(library)
            torch.set_num_threads(3)
            try:
                assert torch.equal(step.computed(library), together)
            finally:
                torch.set_num_threads(1)
            assert_independent(step, library)
    assert_independent(Rows(slides, (1100, 40, 513), 16, torch.float32), None)


@pytest.mark.parametrize("most", PARTS)
def test_memory_is_bounded_and_heads_are_computed_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_MOST_ELEMENTS", most)
    kind = kind_of(2, 3, softcap=2.0, window=100, sink_tokens=5, has_learned_sinks=True)
    assert_close(Step(kind, CHUNKS, 16, torch.float32), None)
    kernel = gathered.GatheredKernel(kind)
    seen = torch.arange(200)
    parts = list(kernel._heads(gathered._Chunk(token=0, count=70, slots=seen, hidden=None)))
    heads = [head for part in parts for head in range(3)[part]]
    assert heads == [0, 1, 2]
    assert len(parts) == (3 if most == PARTS[0] else 1)


def test_only_what_the_kernel_computes_is_covered() -> None:
    assert NativeDecode.covers(kind_of(), torch.float32)
    assert NativeDecode.covers(kind_of(), torch.bfloat16)
    assert not NativeDecode.covers(kind_of(), torch.float16)
    assert not NativeDecode.covers(kind_of(1, 1, 1040, 16), torch.bfloat16)


@pytest.mark.parametrize("dtype", NATIVE, ids=str)
def test_keys_and_values_go_to_their_token_slots(library: NativeLibrary, dtype: torch.dtype) -> None:
    """From a merged matrix of keys and values, as indexed assignment would write them; the padding of heads is kept."""
    merged = torch.randn(7, 3, 24 + 16).to(dtype)
    key, value = merged[..., :24].transpose(0, 1), merged[..., 24:].transpose(0, 1)
    slots = torch.tensor([5, 40, 3, 63, 17, 0, 18])
    found, expected = torch.full((2, 2, 3, 64, 32), 7.0, dtype=dtype)
    KvWriter(library, dtype)(key, value, found[0], found[1], slots)
    expected[0][:, slots, :24], expected[1][:, slots, :16] = key, value
    assert torch.equal(found, expected)
    # A last dimension that is not contiguous.
    KvWriter(library, dtype)(key.mT.contiguous().mT, value, found[0], found[1], slots)
    assert torch.equal(found, expected)
