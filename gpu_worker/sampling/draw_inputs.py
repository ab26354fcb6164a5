"""Gathers the sampling parameters of a step's samples on the host. Imports no torch.

`columns` are the parameters of all rows, by name: those of wire/started.py's SETTINGS, and sample_idx.
"""

from collections.abc import Mapping

import numpy as np

from gpu_worker.arrays import HostArray, Int64Array, Space
from gpu_worker.sampling.inputs import DrawInputs, Typical

# A lower temperature is equivalent to greedy, and logits divided by it would overflow.
MIN_TEMPERATURE = np.float32(1e-5)


def allocated_draw_inputs(num_samples: int, space: Space) -> DrawInputs[HostArray]:
    """Returns parameters with undefined numbers."""
    return DrawInputs(
        temperature=space.float32(num_samples),
        top_p=space.float32(num_samples),
        min_p=space.float32(num_samples),
        top_k=space.int64(num_samples),
        seed=space.int64(num_samples),
        sample_idx=space.int64(num_samples),
        position=space.int64(num_samples),
    )


def draw_inputs(
    columns: Mapping[str, HostArray],
    rows: Int64Array,
    positions: Int64Array,
    *,
    padding: int = 0,
    into: DrawInputs[HostArray] | None = None,
) -> DrawInputs[HostArray]:
    """Returns the parameters of the samples, in the arrays of `into` if it is given.

    `rows` [S] are the rows that sample, `positions` [S] those of the tokens to draw. The last `padding` samples are
    filler and count as greedy.
    """
    out = into or allocated_draw_inputs(rows.size, Space())
    temperature = columns["temperature"][rows]
    # 0 stays 0.
    np.maximum(temperature, MIN_TEMPERATURE, out=temperature, where=temperature > 0)
    out.temperature[:] = temperature
    if padding:
        out.temperature[-padding:] = 0
    out.top_p[:] = columns["top_p"][rows]
    out.min_p[:] = columns["min_p"][rows]
    out.top_k[:] = columns["top_k"][rows]
    out.seed[:] = columns["seed"].view(np.int64)[rows]
    out.sample_idx[:] = columns["sample_idx"][rows]
    out.position[:] = positions
    return out


def typical_samples(columns: Mapping[str, HostArray], rows: Int64Array) -> Typical[HostArray] | None:
    """Returns the samples among `rows` [S] that `choose` cannot draw because they filter by typical_p; None if none."""
    samples = np.flatnonzero((columns["typical_p"][rows] < 1) & (columns["temperature"][rows] > 0))
    return Typical(samples=samples, typical_p=columns["typical_p"][rows[samples]]) if samples.size else None
