"""The table of kernel options: every call that is served has a line on every card, and the first line wins."""

import itertools
import tomllib

import pytest
import torch

from gpu_worker.attention.kernel_options import (
    Call,
    Card,
    chosen,
    entries,
    kernel_options,
    most_group,
    most_head_dim,
)
from gpu_worker.attention.views import GPU_DECODE_BLOCK
from gpu_worker.compatibility.check_model import MAX_HEAD_DIM
from gpu_worker.geometry import GPU_CHUNK_ALIGN

H200 = Card(name="NVIDIA H200", shared_bytes=227 << 10)
# Like an H200, but nothing was measured on it.
H100 = Card(name="NVIDIA H100 80GB HBM3", shared_bytes=227 << 10)
A10G = Card(name="NVIDIA A10G", shared_bytes=99 << 10)
HALVES, FLOAT32 = (torch.bfloat16, torch.float16), torch.float32
# Tiles of tensor cores have at least this size.
LEAST_TILE = 16


def call(dtype: torch.dtype = torch.bfloat16, **changes: int) -> Call:
    fields = {"head_dim": 128, "group": 2, "bucket": 256, "q_block": GPU_CHUNK_ALIGN, "kv_block": GPU_DECODE_BLOCK}
    return Call(dtype=dtype, **fields | changes)


@pytest.mark.parametrize("card", [H200, A10G], ids=lambda card: card.name)
@pytest.mark.parametrize("dtype", [*HALVES, FLOAT32], ids=str)
def test_every_served_call_has_tiles_that_divide_its_blocks(card: Card, dtype: torch.dtype) -> None:
    widest = 256 if dtype == FLOAT32 else MAX_HEAD_DIM
    assert most_head_dim(dtype) == widest
    for head_dim, group, bucket in itertools.product(range(16, MAX_HEAD_DIM + 1, 16), (1, 7, 64, 127), (1, 300)):
        for page in (16, 32, 64, 128, 256):
            if head_dim <= widest and group <= most_group(dtype, head_dim):
                block = min(page, GPU_DECODE_BLOCK)
                asked = call(dtype, head_dim=head_dim, group=group, bucket=bucket, q_block=64, kv_block=block)
                options = kernel_options("decode", card, asked)
                assert options["BACKEND"] == "TRITON_DECODE"
                assert options["BLOCK_N"] >= LEAST_TILE
                assert block % options["BLOCK_N"] == 0
            for q_block in (16, 64, GPU_CHUNK_ALIGN):
                asked = call(dtype, head_dim=head_dim, group=group, bucket=4096, q_block=q_block, kv_block=page)
                options = kernel_options("prefill", card, asked)
                assert options["BACKEND"] == "TRITON"
                assert min(options["BLOCK_M"], options["BLOCK_N"]) >= LEAST_TILE
                assert q_block % options["BLOCK_M"] == page % options["BLOCK_N"] == 0


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("head_dim", "card"), [(64, A10G), (128, A10G), (128, H200), (256, H200)])
def test_decode_in_16_bits_is_pipelined(dtype: torch.dtype, head_dim: int, card: Card) -> None:
    assert kernel_options("decode", card, call(dtype, head_dim=head_dim)) == {
        "BACKEND": "TRITON_DECODE",
        "BLOCK_N": 64,
        "num_warps": 4,
        "num_stages": 2,
    }


def test_a_query_tile_of_a_prefill_kernel_is_that_of_the_mask_or_the_measured_one() -> None:
    for card, tile, warps in ((H100, GPU_CHUNK_ALIGN, 8), (H200, 64, 4)):
        options = kernel_options("prefill", card, call(kv_block=128))
        assert (options["BLOCK_M"], options["BLOCK_N"], options["num_warps"]) == (tile, 64, warps)


def test_cards_with_less_shared_memory_have_smaller_tiles_or_fewer_stages() -> None:
    for which, wide in (("decode", call(head_dim=256)), ("prefill", call(kv_block=128))):
        large, small = (kernel_options(which, card, wide) for card in (H100, A10G))
        assert large["BLOCK_N"] * large["num_stages"] > small["BLOCK_N"] * small["num_stages"]


def test_the_first_line_that_covers_a_call_is_used() -> None:
    table = """
    decode = [
        { itemsize = 2, head_dim = 128, bucket = 8, device = "H200", split_kv = 16, block_n = 16, num_warps = 1, num_stages = 4 },
        { itemsize = 2, head_dim = 128, group = 4, block_n = 32, num_warps = 2, num_stages = 3 },
        { itemsize = 2, head_dim = 256, shared_kib = 128, block_n = 64, num_warps = 4, num_stages = 2 },
        { itemsize = 2, head_dim = 256, block_n = 64, num_warps = 8, num_stages = 1 },
    ]
    """  # noqa: E501 — a line of the table is one line
    lines = entries(tomllib.loads(table))["decode"]
    assert chosen(lines, call(bucket=8), H200).options(call()) == {
        "SPLIT_KV": 16,
        "BLOCK_N": 16,
        "num_warps": 1,
        "num_stages": 4,
    }
    assert chosen(lines, call(bucket=9), H200) is chosen(lines, call(bucket=8), A10G) is lines[1]
    assert chosen(lines, call(group=5), H200) is chosen(lines, call(head_dim=144), H200) is lines[2]
    assert chosen(lines, call(group=5), A10G) is lines[3]
    with pytest.raises(AssertionError, match="has no entry for"):
        chosen(lines, call(FLOAT32), H200)


def test_a_line_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="blok_n"):
        entries({"decode": [{"itemsize": 2, "head_dim": 64, "blok_n": 64, "num_warps": 4, "num_stages": 2}]})


def test_a_cpu_has_partitions_smaller_than_a_block() -> None:
    assert Card.of(torch.device("cpu")) is None
    for which in ("decode", "prefill"):
        assert kernel_options(which, None, call(kv_block=64)) == {"PARTITION_SIZE": 32}
