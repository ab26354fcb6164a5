"""What the sampling rows of a step ask for, as named int64 arrays for the step's one copy, and back as tensors.

Owns the names and encodings of these arrays. Knows nothing of how the copy is made, nor of attention.
"""

import numpy as np
import torch
from torch import Tensor

from gpu_worker.sampler import SamplingInputs
from gpu_worker.samples import Int64Array, SamplePart
from gpu_worker.slots import RowTables


def sample_arrays(samples: SamplePart, tables: RowTables) -> dict[str, Int64Array]:
    """Every int64 array that sampling needs on the device."""
    arrays = {"sample_tokens": samples.tokens, "sample_rows": samples.rows}
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
    return arrays


def sampling_of(
    samples: SamplePart, staged: dict[str, Tensor], tables: RowTables
) -> tuple[SamplingInputs | None, tuple[Tensor, Tensor] | None]:
    """What `sample` needs beside the logits."""
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
