"""A tree of arrays arrives as the same tree of tensors, packed or not."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from gpu_worker.layout.shapes import StepShape
from gpu_worker.step.staging import Staging, arrays_of, num_words, pack, unpack
from gpu_worker.trees import mapped


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


def test_mapped_replaces_arrays_and_keeps_other_values() -> None:
    tree = tree_of()
    doubled = mapped(tree, lambda array: 2 * array)
    assert type(doubled) is Tree and [type(part) for part in doubled.parts] == [Leaf, Leaf]
    assert (doubled.leaf.name, doubled.leaf.absent) == ("leaf", None)
    for before, after in zip(arrays_of(tree), arrays_of(doubled), strict=True):
        np.testing.assert_array_equal(2 * before, after)


def test_mapped_visits_arrays_in_the_order_of_the_fields() -> None:
    tree = tree_of()
    assert [field.name for field in fields(Tree)] == ["table", "leaf", "parts", "pair"]
    assert [array.size for array in arrays_of(tree)] == [6, 3, 3, 0, 0, 5, 5, 2, 4]


def test_unpack_returns_what_pack_wrote() -> None:
    arrays = arrays_of(tree_of())
    words = np.full(num_words(arrays), -1, np.int64)
    pack(arrays, words)
    for array, tensor in zip(arrays, unpack(arrays, torch.from_numpy(words)), strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())
        assert tensor.numpy().dtype == array.dtype


def test_pack_refuses_types_that_the_device_does_not_expect() -> None:
    arrays = [np.zeros(2, np.int32)]
    with pytest.raises(KeyError):
        next(unpack(arrays, torch.zeros(1, dtype=torch.int64)))


def test_uploads_without_padded_steps_keep_their_values(device: torch.device) -> None:
    staging = Staging(torch.device("cpu"), 2, input_words=None)
    sent = tree_of()
    inputs, extras = staging.upload(None, sent, sent.leaf)
    for received, expected in ((inputs, sent), (extras, sent.leaf)):
        for array, tensor in zip(arrays_of(expected), arrays_of(received), strict=True):
            np.testing.assert_array_equal(array, tensor)


def test_inputs_of_one_shape_keep_their_place_and_extras_of_any_size_arrive(device: torch.device) -> None:
    """Extras that do not fit behind the inputs go to a second buffer, which grows."""
    shape = StepShape(decode=3, prefill=0, tokens=3, samples=3, draws=False)
    staging = Staging(device, 2, input_words=8)
    places = set[int]()
    for size in (3, 40_000, 1, 70_000, 9):
        ids, others = np.arange(size, size + 3), np.arange(size)
        sent = Leaf(ids=others, shares=np.linspace(0, 1, size, dtype=np.float32))
        inputs, extras = staging.upload(shape, Leaf(ids=ids, shares=np.ones(3, np.float32)), sent)
        places.add(inputs.ids.data_ptr())
        assert inputs.ids.device.type == device.type
        np.testing.assert_array_equal(inputs.ids.cpu().numpy(), ids)
        np.testing.assert_array_equal(extras.ids.cpu().numpy(), sent.ids)
        np.testing.assert_array_equal(extras.shares.cpu().numpy(), sent.shares)
    assert len(places) == 1
