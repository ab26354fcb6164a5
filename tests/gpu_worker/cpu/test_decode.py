"""The C++ kernel of decode rows against a plain softmax in float64, for every instruction set of this machine."""

import pytest
import torch

from gpu_worker.attention.layers import AttentionKind
from gpu_worker.cpu.attention import KvWriter, NativeDecode
from gpu_worker.native.library import NativeLibrary
from tests.gpu_worker.cpu.attention_rig import TOLERANCE, Rows, assert_close, kind_of

# One token; the edges of a tile of 16, of pages and of the parts (512) into which a long row is divided.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 127, 128, 129, 190, 511, 512, 513, 1100)
KINDS = [
    *(kind_of(group) for group in (1, 2, 3, 4, 5, 7, 8, 16)),
    kind_of(70, 1, 16, 16),
    kind_of(3, 2, 40, 24),
    kind_of(2, 1, 192, 128),
    kind_of(4, 1, 24, 80),
    kind_of(1, 2, 256, 256),
    *(
        kind_of(group, **more)
        for group in (2, 4)
        for more in (
            {"softcap": 2.0},
            {"softcap": 50.0},
            {"has_learned_sinks": True},
            {"window": 1},
            {"window": 37},
            {"window": 600},
            {"window": 100, "has_learned_sinks": True},
            {"window": 100, "sink_tokens": 5},
            {"window": 20, "sink_tokens": 70},
        )
    ),
    kind_of(3, 1, 24, 16, softcap=2.0, window=9, sink_tokens=17, has_learned_sinks=True),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_visibility_equals_a_softmax_in_float64(
    library: NativeLibrary, kind: AttentionKind, dtype: torch.dtype
) -> None:
    for page_size in (16, 128):
        assert_close(Rows(kind, LENGTHS, page_size, dtype), library)


@pytest.mark.parametrize("page_size", [32, 64, 256])
def test_every_page_size(library: NativeLibrary, page_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for group in (1, 4):
            assert_close(Rows(kind_of(group, window=70, sink_tokens=3), LENGTHS, page_size, dtype), library)


@pytest.mark.parametrize("where", ["keys", "values"])
def test_nan_reaches_exactly_the_heads_that_see_it(library: NativeLibrary, where: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
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
    for dtype in (torch.float32, torch.bfloat16):
        rows = Rows(kind_of(4), (100, 600), 64, dtype)
        rows.query *= 300
        found = rows.computed(library)
        # The weights of such scores have the precision of the scores, which are up to 10,000 here.
        assert bool(found.isfinite().all())
        assert (found.double() - rows.expected()).abs().max().item() < 0.02


def test_scores_of_minus_infinity_have_no_weight(library: NativeLibrary) -> None:
    """Even if they fill the first chunk of a row, where no finite score has come yet."""
    for group in (1, 4):
        rows = Rows(kind_of(group), (700,), 64, torch.float32)
        rows.query = rows.query.abs() + 1
        rows.keys[:, rows.slots[0][:600], :32] = -torch.inf
        error = (rows.computed(library).double() - rows.expected()).abs().max().item()
        assert error <= TOLERANCE[torch.float32] * torch.finfo(torch.float32).eps


def test_bits_depend_on_neither_threads_nor_other_rows(library: NativeLibrary) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in (kind_of(2), kind_of(4, window=600, sink_tokens=20)):
            rows = Rows(kind, (1100, 40, 513), 16, dtype)
            together = rows.computed(library)
            torch.set_num_threads(3)
            try:
                assert torch.equal(rows.computed(library), together)
            finally:
                torch.set_num_threads(1)
            for i in range(3):
                assert torch.equal(rows.computed(library, slice(i, i + 1)), together[i : i + 1])


def test_only_what_the_kernel_computes_is_covered() -> None:
    assert NativeDecode.covers(kind_of(), torch.float32)
    assert NativeDecode.covers(kind_of(), torch.bfloat16)
    assert not NativeDecode.covers(kind_of(), torch.float16)
    assert not NativeDecode.covers(kind_of(1, 1, 1040, 16), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
