"""Gathers the sampling parameters of a step's samples on the host. Imports no torch.

`columns` are the parameters of all rows, by name: those of wire/sampling.py's SETTINGS, and sample_idx.
"""

from collections.abc import Mapping

import numpy as np

from gpu_worker.arrays import HostArray, Int64Array, Space
from gpu_worker.sampling.inputs import DrawInputs, Typical

# A lower temperature is equivalent to greedy, and logits divided by it would overflow.
MIN_TEMPERATURE = np.float32(1e-5)


def draw_inputs(
    columns: Mapping[str, HostArray],
    rows: Int64Array,
    positions: Int64Array,
    *,
    padding: int = 0,
    space: Space | None = None,
) -> DrawInputs[HostArray]:
    """Returns the parameters of the samples, in arrays of `space`.

    `rows` [S] are the rows that sample, `positions` [S] those of the tokens to draw. The last `padding` samples are
    filler and count as greedy.
    """
    space = space or Space()
    temperature = columns["temperature"][rows]
    # 0 stays 0.
    np.maximum(temperature, MIN_TEMPERATURE, out=temperature, where=temperature > 0)
    if padding:
        temperature[-padding:] = 0
    return DrawInputs(
        temperature=_float32(temperature, space),
        top_p=_float32(columns["top_p"][rows], space),
        min_p=_float32(columns["min_p"][rows], space),
        top_k=_int64(columns["top_k"][rows], space),
        seed=_int64(columns["seed"][rows].view(np.int64), space),
        sample_idx=_int64(columns["sample_idx"][rows], space),
        position=_int64(positions, space),
    )


def _float32(values: HostArray, space: Space) -> HostArray:
    out = space.float32(values.size)
    out[:] = values
    return out


def _int64(values: HostArray, space: Space) -> HostArray:
    out = space.int64(values.size)
    out[:] = values
    return out


def typical_samples(columns: Mapping[str, HostArray], rows: Int64Array) -> Typical[HostArray] | None:
    """Returns the samples among `rows` [S] that `choose` cannot draw because they filter by typical_p; None if none."""
    samples = np.flatnonzero((columns["typical_p"][rows] < 1) & (columns["temperature"][rows] > 0))
    return Typical(samples=samples, typical_p=columns["typical_p"][rows[samples]]) if samples.size else None
