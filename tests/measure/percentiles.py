"""Percentiles of measured values."""

from collections.abc import Sequence

import numpy as np


def percentiles(values: Sequence[float], which: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Returns interpolated percentiles as `{"p50": …}`; empty without values."""
    if not len(values):
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in which}
