"""What the scheduling of one lane remembers from plan to plan.

- The expected share: an estimate of how much of its remaining output a running request will really produce. It decides
  how many pages stay free when a request is admitted (`policy.headroom`).
- The blocked head: the request at the head of the queue that could not be admitted, and why, so that the lane does not
  check it again every step.
- Lookups: what other lanes found in this lane's prefix cache when they decided which lane starts a request sooner.
"""

from dataclasses import dataclass

FIRST_SHARE, SHARE_DECAY, SHARE_RAISE = 0.3, 0.998, 0.005
"""The expected share at the start, its factor per planned step, and what a step with a preemption adds to it.

The decay and the increments balance at about one preemption in a few hundred steps. That costs less than the rows which
a higher share would keep out."""
_MAX_LOOKUPS = 64
# A blocked head is checked again after this many steps, or when a row becomes free.
_CHECK_AGAIN_STEPS = 32
# The same while fewer pages are unused than the head needs. Only pages that were cached since then can lower its need.
_CHECK_WITHOUT_PAGES_STEPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocked:
    """Why the head of the queue could not be admitted: it needs `pages` unused pages.

    `step` and `num_seated` are the lane's step and its number of seated rows at that time.
    """

    handle: int
    step: int
    num_seated: int
    pages: int


class LaneSchedule:
    """Lives as long as its lane. A reset of the lane drops all but the expected share."""

    def __init__(self) -> None:
        self.expected_share = FIRST_SHARE
        """Share of its remaining output tokens that a running request is expected to produce, at most 1."""
        self._has_preempted = False
        self._blocked: _Blocked | None = None
        self._lookups: dict[tuple[int, int], tuple[int, int]] = {}

    def reset(self) -> None:
        """Drops what depends on the lane's rows and cached pages."""
        self._blocked = None
        self._lookups.clear()

    # The expected share --------------------------------------------------------------------------------------------

    def preempted(self) -> None:
        """Records a preemption, which shows that the expected share was too small."""
        self._has_preempted = True

    def step_planned(self) -> None:
        """Updates the expected share, once per planned step. So the share does not decay while the core is idle."""
        if self._has_preempted:
            self.expected_share = min(1.0, self.expected_share + SHARE_RAISE)
        else:
            self.expected_share *= SHARE_DECAY
        self._has_preempted = False

    # The head of the queue -----------------------------------------------------------------------------------------

    @property
    def is_blocked(self) -> bool:
        """Whether the lane could not admit the head of the queue when it last planned."""
        return self._blocked is not None

    def block(self, handle: int, *, step: int, num_seated: int, pages: int) -> None:
        """Records that a request does not fit because it needs `pages` unused pages.

        With `handle` 0 the lane counts as blocked for other lanes, but checks its head again when it plans next.
        """
        self._blocked = _Blocked(handle=handle, step=step, num_seated=num_seated, pages=pages)

    def unblock(self) -> None:
        """Records that the lane checks the head of the queue again."""
        self._blocked = None

    def still_blocks(self, handle: int, *, step: int, num_seated: int, num_unused: int) -> bool:
        """Returns whether a check of the request can be skipped, because no row has become free since it did not fit.

        `num_unused` is the lane's number of unused pages.
        """
        blocked = self._blocked
        if blocked is None or blocked.handle != handle or not num_seated:
            return False
        if num_unused < blocked.pages:
            return step < blocked.step + _CHECK_WITHOUT_PAGES_STEPS
        return blocked.num_seated == num_seated and step < blocked.step + _CHECK_AGAIN_STEPS

    # Lookups by other lanes ----------------------------------------------------------------------------------------

    def lookup(self, handle: int, known: int) -> tuple[int, int] | None:
        """Returns what another lane found here for the request: its first position and number of cached pages.

        Returns None without a valid lookup. `known` is the request's number of known tokens.
        """
        return self._lookups.get((handle, known))

    def store_lookup(self, handle: int, known: int, found: tuple[int, int]) -> None:
        """Stores a lookup. It is valid until the lane plans or a result arrives."""
        if len(self._lookups) >= _MAX_LOOKUPS:
            self._lookups.clear()
        self._lookups[handle, known] = found

    def clear_lookups(self) -> None:
        """Drops all lookups, because the lane's cached pages may have changed."""
        self._lookups.clear()
