"""A plan's operations on whole pages, carried out before it computes: saves, zeroing, copies, loads, in this order.

Owns the checks of worker.proto's HostCopies, PageCopies and zero_pages, none of which needs row state. Knows nothing of
torch or of the pages' contents.
"""

from dataclasses import dataclass, field
from typing import Any, Generic

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.arrays import Array, HostArray, Int64Array
from gpu_worker.geometry import Geometry
from gpu_worker.wire.fields import PlanError, int32_array

_EMPTY: Any = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOrders(Generic[Array]):
    """Page saved_pages[i] is copied to host page saved_slots[i]; `zeroed` become zero; the first copied_tokens[i] token
    slots of page copied_from[i] are copied to copied_to[i]; host page loaded_slots[i] is copied to loaded_pages[i].

    All int64, so that they can be indices on the device."""

    saved_pages: Array = field(default_factory=lambda: _EMPTY)
    saved_slots: Array = field(default_factory=lambda: _EMPTY)
    zeroed: Array = field(default_factory=lambda: _EMPTY)
    copied_from: Array = field(default_factory=lambda: _EMPTY)
    copied_to: Array = field(default_factory=lambda: _EMPTY)
    copied_tokens: Array = field(default_factory=lambda: _EMPTY)
    loaded_pages: Array = field(default_factory=lambda: _EMPTY)
    loaded_slots: Array = field(default_factory=lambda: _EMPTY)

    def __bool__(self: "PageOrders[HostArray]") -> bool:
        """Whether there is at least one operation."""
        return bool(self.saved_pages.size or self.zeroed.size or self.copied_to.size or self.loaded_pages.size)


NO_ORDERS: PageOrders[HostArray] = PageOrders()


def read_page_orders(message: pb.StepPlan, geometry: Geometry) -> PageOrders[HostArray]:
    """The orders of a plan, checked against `geometry`. Raises PlanError."""
    has = message.HasField
    if not (message.zero_pages or has("saves") or has("copies") or has("loads")):
        return NO_ORDERS
    last_page = geometry.num_pages - 1
    saves, copies, loads = message.saves, message.copies, message.loads
    num_copies = len(copies.sources) // 4
    saved_pages, saved_slots = _host_copies(saves, "saves", geometry)
    loaded_pages, loaded_slots = _host_copies(loads, "loads", geometry)
    orders = PageOrders(
        saved_pages=saved_pages,
        saved_slots=saved_slots,
        zeroed=_int64(message.zero_pages, "zero_pages", 1, last_page),
        copied_from=_int64(copies.sources, "copies.sources", 1, last_page),
        copied_to=_int64(copies.targets, "copies.targets", 1, last_page, num_copies),
        copied_tokens=_int64(copies.counts, "copies.counts", 1, geometry.page_size, num_copies),
        loaded_pages=loaded_pages,
        loaded_slots=loaded_slots,
    )
    # Operations of one kind run at once, so two writes to the same page would have no order.
    written = {"saves.slots": saved_slots, "copies.targets": orders.copied_to, "loads.pages": loaded_pages}
    for name, places in written.items():
        ordered = np.sort(places)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise PlanError(f"{name} contains {twice[0]} twice")
    changed = {"copies.targets": orders.copied_to, "zero_pages": orders.zeroed, "loads.pages": orders.loaded_pages}
    for name, places in changed.items():
        both = np.intersect1d(orders.copied_from, places)
        if both.size:
            raise PlanError(f"page {both[0]} is in copies.sources and in {name}")
    return orders


def _host_copies(message: pb.HostCopies, name: str, geometry: Geometry) -> tuple[Int64Array, Int64Array]:
    if (message.pages or message.slots) and not geometry.host_pages:
        raise PlanError(f"{name} contains host pages; this worker has none (host_pages 0)")
    pages = _int64(message.pages, f"{name}.pages", 1, geometry.num_pages - 1)
    return pages, _int64(message.slots, f"{name}.slots", 0, geometry.host_pages - 1, pages.size)


def _int64(data: bytes, name: str, low: int, high: int, size: int | None = None) -> Int64Array:
    return int32_array(data, name, low, high, size).astype(np.int64)


def note_saves(orders: PageOrders[HostArray], is_saved: NDArray[np.bool_]) -> None:
    """Notes, by host page, what a plan saves. Raises PlanError if it loads a host page without content."""
    is_saved[orders.saved_slots] = True
    unknown = orders.loaded_slots[~is_saved[orders.loaded_slots]]
    if unknown.size:
        raise PlanError(f"loads.slots contains {unknown[0]}, to which no plan saved a page")
