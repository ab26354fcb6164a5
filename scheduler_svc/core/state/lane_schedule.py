"""What the scheduling of one lane remembers from plan to plan.

Owns the lane's expected share, the request that blocks its queue, and the lookups that other lanes made in its prefix
cache. Knows nothing of rows or pages.
"""

from dataclasses import dataclass

FIRST_SHARE, SHARE_DECAY, SHARE_RAISE = 0.3, 0.998, 0.005
"""The expected share at the start, its factor per planned step, and what a preemption adds. The share settles where
preemptions make up for the decay: at about one preemption in a few hundred steps, which costs less than the rows that
a higher share keeps out."""
_MAX_LOOKUPS = 64
# A blocked head is checked again after this many steps, or when a row becomes free.
_CHECK_AGAIN_STEPS = 32
# The same, if fewer pages are unused than the head needs: only pages cached since then could lower its need.
_CHECK_WITHOUT_PAGES_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocked:
    """The queue's head could not be admitted at this step, with this many rows seated."""

    handle: int
    step: int
    num_seated: int
    pages: int
    """Unused pages that the head needs."""


class LaneSchedule:
    """Lives as long as its lane; `reset` drops what depends on the rows."""

    def __init__(self) -> None:
        self.expected_share = FIRST_SHARE
        """Share of its remaining output tokens that a running request is expected to produce."""
        self._has_preempted = False
        self._blocked: _Blocked | None = None
        self._lookups: dict[tuple[int, int], tuple[int, int]] = {}

    def reset(self) -> None:
        """The lane was reset: its rows and perhaps its cached pages are gone."""
        self._blocked = None
        self._lookups.clear()

    # The expected share --------------------------------------------------------------------------------------------

    def preempted(self) -> None:
        """A row was preempted: the expected share was too small."""
        self._has_preempted = True

    def step_planned(self) -> None:
        """Updates the expected share once per planned step. Calls of an idle core, which plan nothing, do not count."""
        if self._has_preempted:
            self.expected_share = min(1.0, self.expected_share + SHARE_RAISE)
        else:
            self.expected_share *= SHARE_DECAY
        self._has_preempted = False

    # The head of the queue -----------------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether the lane could not admit the queue's head when it last planned."""
        return self._blocked is not None

    def block(self, handle: int, *, step: int, num_seated: int, pages: int) -> None:
        """The request, which needs `pages` unused pages, does not fit. A `handle` of 0 blocks no request."""
        self._blocked = _Blocked(handle=handle, step=step, num_seated=num_seated, pages=pages)

    def unblock(self) -> None:
        """The lane checks its queue's head again."""
        self._blocked = None

    def still_blocks(self, handle: int, *, step: int, num_seated: int, num_unused: int) -> bool:
        """Whether nothing has changed since the request did not fit: pages become free when a row does."""
        blocked = self._blocked
        if blocked is None or blocked.handle != handle or not num_seated:
            return False
        if num_unused < blocked.pages:
            return step < blocked.step + _CHECK_WITHOUT_PAGES_STEPS
        return blocked.num_seated == num_seated and step < blocked.step + _CHECK_AGAIN_STEPS

    # Lookups by other lanes ----------------------------------------------------------------------------------------

    def lookup(self, handle: int, known: int) -> tuple[int, int] | None:
        """First position and cached pages that another lane found here for the request; None if not looked up."""
        return self._lookups.get((handle, known))

    def remember(self, handle: int, known: int, found: tuple[int, int]) -> None:
        """Stores a lookup. It holds until the lane plans or a result arrives."""
        if len(self._lookups) >= _MAX_LOOKUPS:
            self._lookups.clear()
        self._lookups[handle, known] = found

    def forget_lookups(self) -> None:
        """The lane's cached pages may have changed."""
        self._lookups.clear()
