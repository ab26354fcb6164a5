"""Blocks of the arena: where they are, how long they are used, and what replays see of them."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.cpu.graphs import Arena


def test_a_tensor_has_the_layout_of_its_model():
    arena = Arena()
    model = torch.empty(2, 5, 3, dtype=torch.bfloat16).transpose(1, 2)
    found = arena.like(model)
    assert (found.shape, found.stride(), found.dtype) == (model.shape, model.stride(), model.dtype)


def test_a_block_is_in_use_as_long_as_any_tensor_on_it():
    arena = Arena()
    part = arena.like(torch.empty(4, 8))[1:, ::2].unsqueeze(0)
    assert arena.num_used == 1
    del part
    assert arena.num_used == 0


def test_a_borrowed_tensor_has_the_same_memory_and_keeps_no_block_in_use():
    arena = Arena()
    own = arena.like(torch.empty(6, 7))
    part = own[2:, 3:].t()
    borrowed = arena.borrowed(part)
    own.copy_(torch.arange(42.0).view(6, 7))
    assert torch.equal(borrowed, part)
    del own, part
    assert arena.num_used == 0


def test_memory_outside_the_arena_is_not_borrowed():
    arena = Arena()
    kept, outside = arena.like(torch.empty(3)), torch.empty(3)
    assert arena.borrowed(outside) is outside
    assert arena.borrowed(kept) is not kept


def test_a_freed_place_is_used_again():
    arena = Arena()
    addresses = {arena.like(torch.empty(1000)).data_ptr() for _ in range(50)}
    assert len(addresses) == 1


def test_a_tensor_larger_than_a_chunk_gets_one_of_its_own():
    arena = Arena()
    arena.like(torch.empty(3 << 20, dtype=torch.uint8)).fill_(1)
    assert arena.num_bytes >= 3 << 20


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_a_tensor_without_elements(dtype: torch.dtype):
    assert Arena().like(torch.empty(0, 4, dtype=dtype)).shape == (0, 4)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-8, -1)), max_size=80))
def test_blocks_in_use_never_overlap(moves: list[int]):
    """A positive number takes a block of that number of bytes, a negative one gives a block back."""
    arena, used = Arena(), []
    for move in moves:
        if move > 0:
            used.append(arena.like(torch.empty(move, dtype=torch.uint8)).fill_(len(used) % 251))
        elif used:
            used.pop(move % len(used))
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in used)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(begin % 64 == 0 for begin, _ in spans)
        assert arena.num_used == len(used)
    used.clear()
    whole = arena.num_bytes
    if whole:
        # What was freed is one block again.
        np.asarray(arena.like(torch.empty(2 << 20, dtype=torch.uint8)))
        assert arena.num_bytes == whole
