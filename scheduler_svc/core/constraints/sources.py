"""`Sources`: the constraints of live requests, each source once, with the limit of all together.

Owns the bytes and the counts of their users. Knows nothing of lanes and never reads a source.
"""

from collections import Counter

MAX_SOURCES_BYTES = 64 << 20
"""Largest size of all sources together."""


class Sources:
    """The source of each constraint that a live request uses, by its hash."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Size of all sources together."""
        self._sources: dict[bytes, bytes] = {}
        # Live requests with each of them.
        self._users: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, name: bytes) -> bytes:
        return self._sources[name]

    def users(self) -> dict[bytes, int]:
        """Returns the number of live requests of each constraint."""
        return dict(self._users)

    def is_other(self, name: bytes, source: bytes) -> bool:
        """Returns whether another source has this hash, so that one of the two hashes is wrong."""
        return self._sources.get(name, source) != source

    def refusal(self, name: bytes, source: bytes) -> str:
        """Returns why there is no room for a constraint, in one sentence; empty if there is."""
        if name in self._sources or self.num_bytes + len(source) <= MAX_SOURCES_BYTES:
            return ""
        return (
            f"the {len(self._sources)} constraints of live requests have {self.num_bytes} bytes and this one has "
            f"{len(source)}; the limit is {MAX_SOURCES_BYTES}"
        )

    def use(self, name: bytes, source: bytes) -> None:
        """Counts one live request with the constraint."""
        if name not in self._sources:
            self._sources[name] = source
            self.num_bytes += len(source)
        self._users[name] += 1

    def release(self, name: bytes) -> bool:
        """Counts one live request less. Returns whether it was the last one, so that the source was freed."""
        self._users[name] -= 1
        if self._users[name]:
            return False
        del self._users[name]
        self.num_bytes -= len(self._sources.pop(name))
        return True
