"""How callers share the gateway's requests, or the memory of bodies: none of them can take all.

A caller may have as many places as it leaves free. So one that takes the most leaves half of them, the next one half of
the rest, and so on. The service has the same rule for its streams.
"""

from collections import Counter


class Places:
    """What is taken, by caller."""

    def __init__(self, num_places: int, *, is_shared: bool = False) -> None:
        self._num_places = num_places
        # Whether there are several callers; one alone may take all.
        self.is_shared = is_shared
        self._taken: Counter[str] = Counter()
        self.num_taken = 0

    def limit(self, caller: str) -> int:
        """The most places that the caller may have now."""
        free = max(0, self._num_places - (self.num_taken - self._taken[caller]))
        return (free + 1) // 2 if self.is_shared else free

    def take(self, caller: str, number: int = 1) -> bool:
        """Takes places; returns False if the caller may not have so many more."""
        if self._taken[caller] + number > self.limit(caller):
            return False
        self._taken[caller] += number
        self.num_taken += number
        return True

    def leave(self, caller: str, number: int = 1) -> None:
        """Gives places back."""
        self.num_taken -= number
        self._taken[caller] -= number
        if not self._taken[caller]:
            del self._taken[caller]
