"""Whether the nodes of a cluster can hold the workers, and the sentence if they cannot. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_UNITS = ("GPU", "CPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node: its name and all of its resources, in use or not."""

    name: str
    resources: Mapping[str, float]


def why_too_small(nodes: Sequence[Node], bundle: Mapping[str, float], count: int) -> str:
    """Why `count` bundles do not fit on the nodes, even on empty ones; an empty string if they do."""
    # Nodes may have the same name.
    total = sum(_room(node, bundle) for node in nodes)
    if total >= count:
        return ""
    held = ", ".join(f"{node.name} has {amounts(node.resources)}" for node in nodes) or "none is there"
    hint = "workers without a GPU need --device cpu" if bundle.get("GPU") and not total else "add nodes, or place fewer"
    return f"{count} workers of {amounts(bundle)} each do not fit: room for {total}; nodes: {held}; {hint}"


def why_not_placed(placed: int, count: int, bundle: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Why only `placed` of `count` bundles were placed on nodes that are large enough."""
    return (
        f"{placed} of {count} workers found {amounts(bundle)} free on a node; free in all of the cluster: "
        f"{amounts(free)}; other work of the cluster holds the rest"
    )


def amounts(resources: Mapping[str, float]) -> str:
    """`1 GPU and 4 CPU`."""
    found = [f"{resources.get(unit, 0.0):g} {unit}" for unit in _UNITS if resources.get(unit)]
    return " and ".join(found) or "no GPU and no CPU"


def _room(node: Node, bundle: Mapping[str, float]) -> int:
    return int(min(node.resources.get(kind, 0.0) // amount for kind, amount in bundle.items() if amount))
