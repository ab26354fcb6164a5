"""Attention by torch's operators against a plain softmax in float64, as the C++ kernels'."""

import pytest
import torch

from gpu_worker.attention.layers import AttentionKind
from gpu_worker.cpu import gathered
from tests.gpu_worker.cpu import test_decode as decode
from tests.gpu_worker.cpu import test_prefill as prefill
from tests.gpu_worker.cpu.attention_rig import Chunk, Rows, Step, assert_close, kind_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTS = [64, 1 << 20]


@pytest.mark.parametrize("kind", decode.KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_visibility(kind: AttentionKind, dtype: torch.dtype) -> None:
    for page_size in (16, 128):
        assert_close(Rows(kind, decode.LENGTHS, page_size, dtype), None)


@pytest.mark.parametrize("kind", prefill.KINDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_every_visibility(kind: AttentionKind, dtype: torch.dtype) -> None:
    for page_size in (16, 128):
        assert_close(Step(kind, prefill.CHUNKS, page_size, dtype), None)


@pytest.mark.parametrize("page_size", [16, 256])
def test_chunks_that_share_pages_of_a_prefix(page_size: int) -> None:
    chunks = [Chunk(start=at, count=count, of=of) for at, count, of in ((100, 90, None), (40, 10, 0), (128, 33, 0))]
    assert_close(Step(kind_of(), chunks, page_size, torch.float32), None)


@pytest.mark.parametrize("most", PARTS)
def test_memory_is_bounded_and_heads_are_computed_in_parts(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_MOST_ELEMENTS", most)
    kind = kind_of(2, 3, softcap=2.0, window=100, sink_tokens=5, has_learned_sinks=True)
    assert_close(Step(kind, prefill.CHUNKS, 16, torch.float32), None)
    kernel = gathered.GatheredKernel(kind)
    seen = torch.arange(200)
    parts = list(kernel._heads(gathered._Chunk(token=0, count=70, slots=seen, hidden=None)))
    heads = [head for part in parts for head in range(3)[part]]
    assert heads == [0, 1, 2]
    assert len(parts) == (3 if most == PARTS[0] else 1)


def test_a_rows_bits_do_not_depend_on_other_rows() -> None:
    rows = Rows(kind_of(4, window=600, sink_tokens=20), (1100, 40, 513), 16, torch.float32)
    together = rows.computed(None)
    for i in range(3):
        assert torch.equal(rows.computed(None, slice(i, i + 1)), together[i : i + 1])
