"""Numbers about numbers: percentiles and spreads of measured values. Knows nothing of what was measured."""

from collections.abc import Sequence

import numpy as np


def percentiles(values: Sequence[float], which: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`{"p50": …}`, interpolated; empty where there are no values."""
    if not len(values):
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in which}


def median_and_spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest."""
    return float(np.median(values)), float(min(values)), float(max(values))
