"""Finds peers that are gone after any connection ended. Owns the times of the probes.

A link's monitor reports that a connection ended, not which peer it belonged to, so every known peer is probed. The
socket learns of the end a moment after its monitor, so probing continues for a second.
"""

from collections.abc import Callable, Iterable

from scheduler_svc.shell.router_link import RouterLink

_PROBE_SECONDS = 1.0
PROBE_EVERY_SECONDS = 0.005


class PeerProbe:
    """Probes the peers of each (link, function that returns its known peers)."""

    def __init__(self, links: tuple[tuple[RouterLink, Callable[[], Iterable[str]]], ...]) -> None:
        self._links = links
        self._until = 0.0
        self._next_at = 0.0

    def next_at(self, now: float) -> float | None:
        """Returns the time of the next probe, None if no connection ended lately."""
        return self._next_at if now < self._until else None

    def find_lost(self, now: float) -> list[tuple[RouterLink, str, str]]:
        """Returns (link, peer, reason) for each peer that is gone; called once per turn."""
        # A list, because the monitor of every link has to be read.
        disconnects = [link.has_disconnects() for link, _ in self._links]
        if any(disconnects):
            self._until = now + _PROBE_SECONDS
        if now >= self._until or now < self._next_at:
            return []
        # Probes are spaced, because a peer that reads slowly must not be lost to a flood of them.
        self._next_at = now + PROBE_EVERY_SECONDS
        return [(link, peer, why) for link, peers in self._links for peer, why in link.unreachable(list(peers()))]
