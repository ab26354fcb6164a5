"""A plan's operations on whole pages, carried out before it computes: saves, zeroing, copies, loads, in this order.

Owns the checks of worker.proto's HostCopies, PageCopies and zero_pages, none of which needs row state. Knows nothing of
torch or of the pages' contents.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import Int32Array, PlanError, int32_array

_EMPTY = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOrders:
    """Page saved_pages[i] is copied to host page saved_slots[i]; `zeroed` become zero; the first copied_tokens[i] token
    slots of page copied_from[i] are copied to copied_to[i]; host page loaded_slots[i] is copied to loaded_pages[i]."""

    saved_pages: Int32Array = field(default_factory=lambda: _EMPTY)
    saved_slots: Int32Array = field(default_factory=lambda: _EMPTY)
    zeroed: Int32Array = field(default_factory=lambda: _EMPTY)
    copied_from: Int32Array = field(default_factory=lambda: _EMPTY)
    copied_to: Int32Array = field(default_factory=lambda: _EMPTY)
    copied_tokens: Int32Array = field(default_factory=lambda: _EMPTY)
    loaded_pages: Int32Array = field(default_factory=lambda: _EMPTY)
    loaded_slots: Int32Array = field(default_factory=lambda: _EMPTY)

    def __bool__(self) -> bool:
        """Whether there is at least one operation."""
        return bool(self.saved_pages.size or self.zeroed.size or self.copied_to.size or self.loaded_pages.size)


NO_ORDERS = PageOrders()


def read_page_orders(message: pb.StepPlan, geometry: Geometry) -> PageOrders:
    """The orders of a plan, checked against `geometry`. Raises PlanError."""
    last_page = geometry.num_pages - 1
    if not (message.zero_pages or any(message.HasField(name) for name in ("saves", "copies", "loads"))):
        return NO_ORDERS
    saves, copies, loads = message.saves, message.copies, message.loads
    num_copies = len(copies.sources) // 4
    saved_pages, saved_slots = _host_copies(saves, "saves", geometry)
    loaded_pages, loaded_slots = _host_copies(loads, "loads", geometry)
    orders = PageOrders(
        saved_pages=saved_pages,
        saved_slots=saved_slots,
        zeroed=int32_array(message.zero_pages, "zero_pages", 1, last_page),
        copied_from=int32_array(copies.sources, "copies.sources", 1, last_page),
        copied_to=int32_array(copies.targets, "copies.targets", 1, last_page, num_copies),
        copied_tokens=int32_array(copies.counts, "copies.counts", 1, geometry.page_size, num_copies),
        loaded_pages=loaded_pages,
        loaded_slots=loaded_slots,
    )
    # Operations of one kind run at once, so two writes to the same page would have no order.
    for name, places in (
        ("saves.slots", orders.saved_slots),
        ("copies.targets", orders.copied_to),
        ("loads.pages", orders.loaded_pages),
    ):
        _distinct(name, places)
    for name, taken in (
        ("copies.targets", orders.copied_to),
        ("zero_pages", orders.zeroed),
        ("loads.pages", orders.loaded_pages),
    ):
        both = np.intersect1d(orders.copied_from, taken)
        if both.size:
            raise PlanError(f"copies.sources contains {both[0]}, which {name} contains too")
    return orders


def _host_copies(message: pb.HostCopies, name: str, geometry: Geometry) -> tuple[Int32Array, Int32Array]:
    if (message.pages or message.slots) and not geometry.host_pages:
        raise PlanError(f"{name} names host pages; this worker has none (host_pages 0)")
    pages = int32_array(message.pages, f"{name}.pages", 1, geometry.num_pages - 1)
    return pages, int32_array(message.slots, f"{name}.slots", 0, geometry.host_pages - 1, pages.size)


def _distinct(name: str, values: NDArray[np.int32]) -> None:
    ordered = np.sort(values)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(f"{name} contains {twice[0]} twice")
