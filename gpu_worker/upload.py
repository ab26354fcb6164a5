"""A step's arrays by name, for one copy to the device.

Owns the names of the arrays that attention and the page tables read. Knows nothing of how the copy is made.
"""

from gpu_worker.sampling_upload import sample_arrays
from gpu_worker.slots import RowTables
from gpu_worker.step import Int64Array, StepLayout


def step_arrays(layout: StepLayout, tables: RowTables, slot_of_row: Int64Array) -> dict[str, Int64Array]:
    """Every int64 array the device needs, parts of one size per shape first, so that their places are static."""
    arrays = {
        "token_ids": layout.token_ids,
        "positions": layout.positions,
        "kv_slots": layout.kv_slots,
    }
    if layout.decode is not None:
        for name in ("rows", "slots", "list_slots", "num_blocks", "last_slot", "page_end"):
            values = getattr(layout.decode, name)
            if values is not None:
                arrays[f"decode_{name}"] = values
    if layout.prefill is not None:
        for name in ("slots", "num_full", "num_partial", "partial_pages", "q_positions", "places"):
            arrays[f"prefill_{name}"] = getattr(layout.prefill, name)
    arrays |= sample_arrays(layout.samples, tables)
    arrays["edit_slots"] = slot_of_row[layout.edits.rows]
    arrays["edit_cols"], arrays["edit_pages"] = layout.edits.cols, layout.edits.pages
    return arrays
