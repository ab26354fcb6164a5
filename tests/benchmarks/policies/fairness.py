"""How even service was: Jain's index of what tenants got over what an even hand would have given them.

Owns the arithmetic. Method: Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984), with the max-min fair
share of each tenant as its optimum, so that a tenant who asks for little does not look badly served.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def max_min_shares(asked: FloatArray, capacity: float) -> FloatArray:
    """Everybody gets what it asks for up to one level, which uses the capacity up."""
    shares, left = np.zeros(len(asked)), capacity
    order = np.argsort(asked, kind="stable")
    for i, tenant in enumerate(order):
        shares[tenant] = min(asked[tenant], left / (len(asked) - i))
        left -= shares[tenant]
    return shares


def jain_index(served: FloatArray, asked: FloatArray) -> float:
    """1: as even as can be; 1 / tenants: one got everything. Tenants that asked for nothing do not count."""
    shares = max_min_shares(asked, float(served.sum()))
    part = served[shares > 0] / shares[shares > 0]
    squares = float((part**2).sum())
    return float(part.sum()) ** 2 / (len(part) * squares) if squares else 1.0
