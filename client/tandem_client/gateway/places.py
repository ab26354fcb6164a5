"""How callers share the gateway's requests: none of them can take all.

A caller may have as many places as it leaves free. So one that takes the most leaves half of them, the next one half of
the rest, and so on. The service has the same rule for its streams.
"""

from collections import Counter


class Places:
    """The requests in work, by caller."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        # Without tokens there is one caller, and it may take all.
        self.is_shared = False
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def limit(self, caller: str) -> int:
        """The most places that the caller may have now."""
        free = max(0, self._num_places - (self.num_taken - self._taken[caller]))
        return (free + 1) // 2 if self.is_shared else free

    def take(self, caller: str) -> bool:
        """Takes a place; returns False if the caller may not have another one."""
        if self._taken[caller] >= self.limit(caller):
            return False
        self._taken[caller] += 1
        self.num_taken += 1
        return True

    def leave(self, caller: str) -> None:
        """Gives a place back."""
        self.num_taken -= 1
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]
