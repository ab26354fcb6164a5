"""Gathers the sampling parameters of a step's samples on the host. Imports no torch.

`columns` are the parameters of all rows, by name: those of wire/sampling.py's SETTINGS, and sample_idx.
"""

from collections.abc import Mapping

import numpy as np

from gpu_worker.arrays import HostArray, Int64Array
from gpu_worker.sampling.inputs import DrawInputs, Typical

# A lower temperature is equivalent to greedy, and logits divided by it would overflow.
MIN_TEMPERATURE = np.float32(1e-5)


def draw_inputs(
    columns: Mapping[str, HostArray], rows: Int64Array, positions: Int64Array, *, padding: int = 0
) -> DrawInputs[HostArray] | None:
    """Returns the parameters of the samples, or None if every sample is greedy.

    `rows` [S] are the rows that sample, `positions` [S] those of the tokens to draw. The last `padding` samples are
    filler and count as greedy.
    """
    temperature = columns["temperature"][rows]
    if padding:
        temperature[-padding:] = 0
    if not (temperature > 0).any():
        return None
    return DrawInputs(
        temperature=np.where(temperature > 0, np.maximum(temperature, MIN_TEMPERATURE), np.float32(0)),
        top_p=columns["top_p"][rows],
        min_p=columns["min_p"][rows],
        top_k=columns["top_k"][rows],
        seed=columns["seed"][rows].view(np.int64),
        sample_idx=columns["sample_idx"][rows],
        position=positions,
    )


def typical_samples(columns: Mapping[str, HostArray], rows: Int64Array) -> Typical[HostArray] | None:
    """Returns the samples among `rows` [S] that `choose` cannot draw because they filter by typical_p; None if none."""
    samples = np.flatnonzero((columns["typical_p"][rows] < 1) & (columns["temperature"][rows] > 0))
    return Typical(samples=samples, typical_p=columns["typical_p"][rows[samples]]) if samples.size else None
