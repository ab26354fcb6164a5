"""The row tables that kernels read, on the device: pages of each row, each page's logical index, newest tokens."""

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.geometry import Geometry
from gpu_worker.layout.row_tables import SlotEdits


def spread_order(num_slots: int) -> NDArray[np.int64]:
    """Returns a permutation of 0..num_slots-1 whose first k values are spread evenly, for every k (bit reversal).

    The CPU kernel gives each thread a contiguous part of the slots, and rows are allocated lowest first: in that order
    the first threads would compute all rows when few run.
    """
    bits = max(1, (num_slots - 1).bit_length())
    reversed_bits = [int(f"{slot:0{bits}b}"[::-1], 2) for slot in range(1 << bits)]
    return np.array([slot for slot in reversed_bits if slot < num_slots], np.int64)


class DeviceTables:
    """The tables that kernels read: the page table, each page's logical index, newest tokens."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        num_slots = geometry.max_rows + 1
        # The CPU kernel requires lists as wide as the pool; other kernels need only the pages of a row.
        width = geometry.num_pages if on_cpu else geometry.pages_per_row
        self.slot_of_row = spread_order(num_slots) if on_cpu else np.arange(num_slots, dtype=np.int64)
        self.pages = torch.zeros(num_slots, max(width, geometry.pages_per_row), dtype=torch.int32, device=device)
        # A page that several rows share has the same logical index in each. The last entry is for the learned sinks.
        self.logical_of_page = torch.zeros(geometry.num_pages + 1, dtype=torch.int32, device=device)
        # The newest token of each row; row 0 is padding.
        self.newest_token = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def set_pages(self, edits: SlotEdits[torch.Tensor]) -> None:
        """Applies a plan's edits of the page table."""
        self.pages.index_put_((edits.slots, edits.cols), edits.pages.int())
        self.logical_of_page.index_put_((edits.pages,), edits.cols.int())
