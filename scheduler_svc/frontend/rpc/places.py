"""Owns the rule by which tenants share a bounded number of places, so that none of them can take all.

A tenant may have as many places as it leaves free. So one that takes the most leaves half of them, the next one half of
the rest, and so on; the last place goes to a tenant that has none. Without tokens there is one tenant, and it may take
all.
"""

from collections import Counter
from collections.abc import Mapping


def share(num_places: int, num_of_others: int, *, is_shared: bool) -> int:
    """The most places that a tenant may have beside those of others."""
    free = max(0, num_places - num_of_others)
    return (free + 1) // 2 if is_shared else free


class Places:
    """What each tenant has of them."""

    def __init__(self, num_places: int, *, is_shared: bool) -> None:
        """`is_shared`: whether several tenants call."""
        self._num_places = num_places
        self._is_shared = is_shared
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def of(self, tenant: str) -> int:
        """The places that the tenant has."""
        return self._taken[tenant]

    def limit(self, tenant: str) -> int:
        """The most places that the tenant may have now."""
        return share(self._num_places, self.num_taken - self._taken[tenant], is_shared=self._is_shared)

    def add(self, tenant: str, change: int) -> None:
        """Takes places, or gives them back if `change` is negative."""
        self.num_taken += change
        self._taken[tenant] += change
        if not self._taken[tenant]:
            del self._taken[tenant]

    def replace(self, taken: Mapping[str, int]) -> None:
        """Stores what all tenants have."""
        self._taken = Counter(taken)
        self.num_taken = self._taken.total()
