"""A step's arrays by name, for one copy to the device.

Owns the names of the arrays that attention, page tables and page orders read. Knows nothing of how the copy is made.
"""

from collections.abc import Sequence

import numpy as np

from gpu_worker.step.layout import Int64Array, StepLayout
from gpu_worker.step.row_tables import RowTables
from gpu_worker.step.sampling_upload import sample_arrays
from gpu_worker.wire.page_orders import PageOrders

_DECODE_VIEW = ("num_blocks", "skipped", "gap_start", "gap_end", "leading_gap_start", "leading_gap_end")


def step_arrays(layout: StepLayout, tables: RowTables, slot_of_row: Int64Array) -> dict[str, Int64Array]:
    """Every int64 array the device needs, parts of one size per shape first, so that their places are static."""
    arrays = {
        "token_ids": layout.token_ids,
        "positions": layout.positions,
        "kv_slots": layout.kv_slots,
    }
    if layout.decode is not None:
        arrays |= _present("decode", layout.decode, ("rows", "slots", "list_slots", "last_slot", "page_end"))
        for i, view in enumerate(layout.decode.views):
            arrays |= _present(f"decode_{i}", view, _DECODE_VIEW)
    if layout.prefill is not None:
        for i, tile_view in enumerate(layout.prefill.views):
            names = ("num_full", "skipped", "num_partial", "partial_pages")
            arrays |= _present(f"prefill_{i}", tile_view, names)
        arrays |= _present("prefill", layout.prefill, ("slots", "q_positions", "places"))
    arrays |= sample_arrays(layout.samples, tables)
    arrays["edit_slots"] = slot_of_row[layout.edits.rows]
    arrays["edit_cols"], arrays["edit_pages"] = layout.edits.cols, layout.edits.pages
    return arrays


def order_arrays(orders: PageOrders) -> dict[str, Int64Array]:
    """What the device must be told of a plan's page orders; most plans have none."""
    names = ("saved_pages", "zeroed", "copied_from", "copied_to", "copied_tokens", "loaded_pages")
    values = ((name, getattr(orders, name)) for name in names)
    return {name: array.astype(np.int64) for name, array in values if array.size}


def _present(prefix: str, part: object, names: Sequence[str]) -> dict[str, Int64Array]:
    values = {f"{prefix}_{name}": getattr(part, name) for name in names}
    return {name: array for name, array in values.items() if array is not None}
