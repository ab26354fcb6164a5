"""How fair the service was: Jain's index of what tenants got, relative to their fair shares.

Owns the arithmetic. Method: Jain, Chiu and Hawe, "A quantitative measure of fairness" (1984), with the max-min fair
share of each tenant as its optimum, so that a tenant with few requests does not look badly served.
"""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def max_min_shares(asked: FloatArray, capacity: float) -> FloatArray:
    """Returns the max-min fair shares: each tenant gets what it asks for, up to one common level."""
    shares, left = np.zeros(len(asked)), capacity
    order = np.argsort(asked, kind="stable")
    for i, tenant in enumerate(order):
        shares[tenant] = min(asked[tenant], left / (len(asked) - i))
        left -= shares[tenant]
    return shares


def jain_index(served: FloatArray, asked: FloatArray) -> float:
    """Returns 1 for perfect fairness, 1 / tenants if one got everything. Tenants without requests do not count."""
    shares = max_min_shares(asked, float(served.sum()))
    part = served[shares > 0] / shares[shares > 0]
    squares = float((part**2).sum())
    return float(part.sum()) ** 2 / (len(part) * squares) if squares else 1.0
