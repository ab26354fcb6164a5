"""A tree of arrays arrives as the same tree of tensors, packed or not."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from gpu_worker.arrays import Space
from gpu_worker.cuda.staging import Staging, Stream, address_of, num_words, pack, unpack
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.trees import leaves, mapped
from tests.rigs.padded_shapes import HostStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Arrays of both types, and values that are not arrays."""

    ids: object
    shares: object
    name: str = "leaf"
    absent: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Trees alone and in tuples."""

    table: object
    leaf: Leaf | None
    parts: tuple[Leaf, ...]
    pair: tuple[object, object]


def tree_of() -> Tree:
    draw = np.random.default_rng(1)
    # An odd number of float32 ends inside an 8-byte word.
    leaves = [Leaf(ids=draw.integers(-9, 9, n), shares=draw.random(n, np.float32)) for n in (3, 0, 5)]
    table = draw.integers(-(1 << 62), 1 << 62, (2, 3))
    pair = draw.integers(0, 9, 2), draw.integers(0, 9, 4)
    return Tree(table=table, leaf=leaves[0], parts=tuple(leaves[1:]), pair=pair)


def test_mapped_replaces_arrays_in_the_order_of_the_fields_and_keeps_other_values() -> None:
    tree = tree_of()
    assert [field.name for field in fields(Tree)] == ["table", "leaf", "parts", "pair"]
    assert [array.size for array in leaves(tree)] == [6, 3, 3, 0, 0, 5, 5, 2, 4]
    doubled = mapped(tree, lambda array: 2 * array)
    assert type(doubled) is Tree and [type(part) for part in doubled.parts] == [Leaf, Leaf]
    assert (doubled.leaf.name, doubled.leaf.absent) == ("leaf", None)
    for before, after in zip(leaves(tree), leaves(doubled), strict=True):
        np.testing.assert_array_equal(2 * before, after)


def test_unpack_returns_what_pack_wrote() -> None:
    arrays = leaves(tree_of())
    words = np.full(num_words(arrays), -1, np.int64)
    pack(arrays, words)
    for array, tensor in zip(arrays, unpack(arrays, torch.from_numpy(words)), strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())
        assert tensor.numpy().dtype == array.dtype


def test_pack_refuses_types_that_the_device_does_not_expect() -> None:
    arrays = [np.zeros(2, np.int32)]
    with pytest.raises(KeyError):
        next(unpack(arrays, torch.zeros(1, dtype=torch.int64)))


def staging_on(device: torch.device, num_buffers: int, *, input_words: int) -> Staging:
    return Staging(HostStream() if device.type == "cpu" else Stream(), device, num_buffers, input_words=input_words)


SHAPE = StepShape(decode=3, prefill=0, tokens=3, samples=3, draws=False)


def allocate(space: Space) -> Leaf:
    return Leaf(ids=space.int64(6).reshape(2, 3), shares=space.float32(3))


def test_inputs_of_one_shape_keep_their_place_and_extras_of_any_size_arrive(device: torch.device) -> None:
    """Extras that do not fit behind the inputs go to a second buffer, which grows."""
    staging = staging_on(device, 2, input_words=8)
    places = set[tuple[int, int]]()
    for size in (3, 40_000, 1, 70_000, 50_000, 9):
        sent = staging.inputs(SHAPE, allocate)
        sent.ids[:], sent.shares[:] = size + np.arange(6).reshape(2, 3), size + 0.5
        others = Leaf(ids=np.arange(size), shares=np.linspace(0, 1, size, dtype=np.float32))
        inputs, extras = staging.upload(sent, others)
        places.add((inputs.ids.data_ptr(), inputs.shares.data_ptr()))
        assert inputs.ids.device.type == device.type
        assert inputs.ids.tolist() == [[size, size + 1, size + 2], [size + 3, size + 4, size + 5]]
        assert inputs.shares.tolist() == [size + 0.5] * 3
        np.testing.assert_array_equal(extras.ids.cpu().numpy(), others.ids)
        np.testing.assert_array_equal(extras.shares.cpu().numpy(), others.shares)
    assert len(places) == 1


def test_host_buffers_take_turns() -> None:
    """A buffer is not written before the copy from it has ended, which is when the other buffers have been used."""
    staging = staging_on(torch.device("cpu"), 3, input_words=8)
    seen: list[int] = []
    for _ in range(6):
        sent = staging.inputs(SHAPE, allocate)
        assert staging.inputs(SHAPE, allocate) is sent, "inputs that were not uploaded are overwritten"
        seen.append(address_of(sent.ids))
        staging.upload(sent, None)
    assert len(set(seen[:3])) == 3 and seen[3:] == seen[:3]


def test_shapes_with_prompt_logits_are_not_kept() -> None:
    staging = staging_on(torch.device("cpu"), 1, input_words=8)
    shape = replace(SHAPE, prompt_logits=2)
    first = staging.inputs(shape, allocate)
    staging.upload(first, None)
    assert staging.inputs(shape, allocate) is not first


def test_extras_without_inputs_arrive(device: torch.device) -> None:
    staging = staging_on(device, 2, input_words=8)
    for size in (4, 5, 20_000):
        staging.inputs(SHAPE, allocate).ids[:] = 1
        inputs, extras = staging.upload(None, Leaf(ids=np.arange(size), shares=np.ones(1, np.float32)))
        assert inputs is None
        assert extras.ids.tolist() == list(range(size))


def test_inputs_of_another_step_or_outside_the_buffer_are_refused() -> None:
    staging = staging_on(torch.device("cpu"), 2, input_words=8)
    first = staging.inputs(SHAPE, allocate)
    staging.upload(first, None)
    staging.inputs(SHAPE, allocate)
    with pytest.raises(AssertionError, match="not those of this step"):
        staging.upload(first, None)
    other = replace(SHAPE, samples=2)
    with pytest.raises(AssertionError, match="not in the space"):
        staging.inputs(other, lambda space: Leaf(ids=np.arange(3), shares=space.float32(1)))


def test_a_space_hands_out_arrays_that_do_not_overlap() -> None:
    words = np.zeros(10, np.int64)
    space = Space(words)
    first, shares, second = space.int64(3), space.float32(3), space.int64(4)
    first[:], shares[:], second[:] = 1, 0.5, 2
    assert space.used == 9
    assert (first.tolist(), shares.tolist(), second.tolist()) == ([1] * 3, [0.5] * 3, [2] * 4)
    assert words[[0, 2, 5, 8, 9]].tolist() == [1, 1, 2, 2, 0]
    with pytest.raises(MemoryError, match="11 words do not fit in a buffer of 10"):
        space.float32(4)
