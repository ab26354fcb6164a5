"""Trees of arrays: frozen dataclasses with fields that are arrays, trees, tuples of these, or other values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with every array or tensor x replaced by change(x), in the order of the fields.

    Python cannot express the type Tree[HostArray] → Tree[Tensor], so callers annotate the result.
    """
    if tree is None:
        return None
    if isinstance(tree, (np.ndarray, Tensor)):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple([mapped(part, change) for part in tree])
    names = _field_names(type(tree))
    return type(tree)(**{name: mapped(getattr(tree, name), change) for name in names}) if names else tree


def leaves(tree: Any) -> list[Any]:
    """The arrays or tensors of a tree, in the order of the fields."""
    leaves_: list[Any] = []
    _collect(tree, leaves_)
    return leaves_


def _collect(tree: Any, leaves_: list[Any]) -> None:
    if tree is None:
        return
    if isinstance(tree, (np.ndarray, Tensor)):
        leaves_.append(tree)
        return
    for part in tree if isinstance(tree, tuple) else [getattr(tree, name) for name in _field_names(type(tree))]:
        _collect(part, leaves_)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
