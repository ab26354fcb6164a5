"""Which host pages have content, so that a plan loads none that no plan saved."""

import numpy as np

from gpu_worker.arrays import HostArray
from gpu_worker.wire.fields import PlanError
from gpu_worker.wire.page_orders import PageOrders


class SavedPages:
    """Host pages to which a plan of this session has saved a page."""

    def __init__(self, host_pages: int) -> None:
        self._is_saved = np.zeros(host_pages, np.bool_)

    def forget(self) -> None:
        """Begins a session, in which no page was saved yet."""
        self._is_saved[:] = False

    def follow(self, orders: PageOrders[HostArray]) -> None:
        """Notes what a plan saves. Raises PlanError if it loads a host page without content."""
        self._is_saved[orders.saved_slots] = True
        unknown = orders.loaded_slots[~self._is_saved[orders.loaded_slots]]
        if unknown.size:
            raise PlanError(f"loads.slots contains {unknown[0]}, to which no plan saved a page")
