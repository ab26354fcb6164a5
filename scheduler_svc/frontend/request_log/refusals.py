"""Bounds the lines of refused requests, so that a flood of them fills no disk. Owns the counts between two reports."""

from collections import Counter
from collections.abc import Iterator

REPORT_SECONDS = 10.0
LINES_EACH = 10
# Kinds that are counted apart; the others share one count. A kind may contain the name of a field.
_MAX_KINDS = 64

Kind = tuple[str, str]
OTHER: Kind = ("others", "")


class RefusalCounts:
    """Counts refusals by code and reason."""

    def __init__(self) -> None:
        self._counts: Counter[Kind] = Counter()
        self._report_at = 0.0

    def add(self, kind: Kind) -> bool:
        """Counts a refusal. Returns whether it gets a line: the first ones of its kind since the last report do."""
        if kind not in self._counts and len(self._counts) >= _MAX_KINDS:
            kind = OTHER
        self._counts[kind] += 1
        return self._counts[kind] <= LINES_EACH

    def due(self, now: float) -> Iterator[tuple[Kind, int]]:
        """Yields every ten seconds the kinds with refusals that got no line, and their number; then starts anew."""
        if now < self._report_at:
            return
        counts, self._counts = self._counts, Counter()
        self._report_at = now + REPORT_SECONDS
        for kind, count in counts.items():
            if count > LINES_EACH:
                yield kind, count - LINES_EACH
