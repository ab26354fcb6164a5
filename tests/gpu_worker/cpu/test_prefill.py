"""The C++ kernel of prompt chunks against a plain softmax in float64, for every instruction set of this machine."""

import pytest
import torch

from gpu_worker.attention.layers import AttentionKind, AttentionPattern
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.cpu.attention_rig import TOLERANCE, Chunk, Step, assert_close, kind_of

KINDS = [
    kind_of(),
    kind_of(1, 8),
    kind_of(8, 1),
    kind_of(3, 2, 40, 24),
    kind_of(2, 1, 192, 128),
    kind_of(1, 2, 256, 256),
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
    for kind in (kind_of(1, 2), kind_of(3, 2)):
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
        step = Step(kind_of(3, 2), chunks, 16, dtype)
        together = step.computed(library)
        torch.set_num_threads(3)
        try:
            assert torch.equal(step.computed(library), together)
        finally:
            torch.set_num_threads(1)
        for together_of, i in zip(together.split([chunk.count for chunk in chunks]), range(3), strict=True):
            assert torch.equal(step.computed(library, slice(i, i + 1)), together_of)
