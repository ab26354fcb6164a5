"""Percentiles of measured values. Knows nothing of what was measured."""

from collections.abc import Sequence

import numpy as np


def percentiles(values: Sequence[float], which: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`{"p50": …}`, interpolated; empty where there are no values."""
    if not len(values):
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in which}
