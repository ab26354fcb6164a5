"""A step's arrays and sampling parameters as named int64 arrays for one copy, and back as the device's tensors.

Owns the names and encodings between host layout and device step. Knows nothing of how the copy is made.
"""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampler import SamplingInputs
from gpu_worker.slots import RowTables
from gpu_worker.step import Int64Array, StepLayout


def step_arrays(layout: StepLayout, tables: RowTables, slot_of_row: Int64Array) -> dict[str, Int64Array]:
    """Every int64 array the device needs, parts of one size per shape first, so that their places are static."""
    arrays = {
        "token_ids": layout.token_ids,
        "positions": layout.positions,
        "kv_slots": layout.kv_slots,
        "sample_tokens": layout.samples.tokens,
        "sample_rows": layout.samples.rows,
    }
    if layout.decode is not None:
        for name in ("rows", "slots", "list_slots", "num_blocks", "last_slot", "page_end"):
            values = getattr(layout.decode, name)
            if values is not None:
                arrays[f"decode_{name}"] = values
    if layout.prefill is not None:
        for name in ("slots", "num_full", "num_partial", "partial_pages", "q_positions", "places"):
            arrays[f"prefill_{name}"] = getattr(layout.prefill, name)
    samples = layout.samples
    if samples.drawing.size:
        rows = samples.rows[samples.drawing]
        arrays["drawing"] = samples.drawing
        arrays["drawing_position"] = samples.positions[samples.drawing]
        for name in ("temperature", "top_p", "min_p"):
            # Floats travel as the bits of float64 in the one int64 buffer.
            arrays[f"drawing_{name}"] = tables.sampling[name][rows].astype(np.float64).view(np.int64)
        arrays["drawing_seed"] = tables.sampling["seed"][rows].view(np.int64)
        for name in ("top_k", "sample_idx"):
            arrays[f"drawing_{name}"] = tables.sampling[name][rows].astype(np.int64)
    if samples.banned_samples.size:
        arrays["banned_samples"], arrays["banned_tokens"] = samples.banned_samples, samples.banned_tokens
    arrays["edit_slots"] = slot_of_row[layout.edits.rows]
    arrays["edit_cols"], arrays["edit_pages"] = layout.edits.cols, layout.edits.pages
    return arrays


def sampling_of(
    layout: StepLayout, staged: dict[str, Tensor], tables: RowTables
) -> tuple[SamplingInputs | None, tuple[Tensor, Tensor] | None]:
    """What `sample` needs beside the logits."""
    samples = layout.samples
    banned = (staged["banned_samples"], staged["banned_tokens"]) if samples.banned_samples.size else None
    if not samples.drawing.size:
        return None, banned
    rows = samples.rows[samples.drawing]
    top_k, top_p = tables.sampling["top_k"][rows], tables.sampling["top_p"][rows]
    by_rank = (top_k > 0) | (top_p < 1)
    inputs = SamplingInputs(
        rows=staged["drawing"],
        temperature=staged["drawing_temperature"].view(torch.float64).float(),
        top_p=staged["drawing_top_p"].view(torch.float64).float(),
        top_k=staged["drawing_top_k"],
        min_p=staged["drawing_min_p"].view(torch.float64).float(),
        seed=staged["drawing_seed"],
        sample_idx=staged["drawing_sample_idx"],
        position=staged["drawing_position"],
        largest_top_k=int(top_k[by_rank].max()) if by_rank.any() and (top_k[by_rank] > 0).all() else None,
        filters_rank=bool(by_rank.any()),
        filters_min_p=bool((tables.sampling["min_p"][rows] > 0).any()),
    )
    return inputs, banned
