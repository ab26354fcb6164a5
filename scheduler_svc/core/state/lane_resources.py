"""`LaneResources`: what one worker knows of the constraints, as the core sees it.

Owns the state of each constraint that the worker has been sent, the orders that are due, and when an answer is overdue.
Knows nothing of requests and sources.
"""

from enum import Enum

ANSWER_SECONDS = 120.0
"""A worker that has not answered a PrepareResource for this long cannot use the constraint. It compiles one after
another, each for at most 2 s of CPU time, on a slow machine 8 s, so this is enough for those of a burst of requests
with slow ones."""


class _State(Enum):
    PREPARING = "the worker was sent it and has not answered"
    READY = "the worker has prepared it"
    UNSURE = "the worker had prepared it before a reset; it is sent again before it is used"


class LaneResources:
    """A constraint is named by its hash."""

    def __init__(self) -> None:
        self.wanted: dict[bytes, None] = {}
        """The constraints that the worker is to prepare next, in order. If there are none, planning does nothing."""
        self._states: dict[bytes, _State] = {}
        # When the answer is due.
        self._due: dict[bytes, float] = {}
        # Constraints without a user, and the step of the last plan that may name them, at least 1.
        self._unused: dict[bytes, int] = {}

    def is_ready(self, name: bytes) -> bool:
        """Returns whether rows with the constraint may sample."""
        return self._states.get(name) is _State.READY

    def is_preparing(self, name: bytes) -> bool:
        """Returns whether the worker was sent the constraint and has not answered."""
        return self._states.get(name) is _State.PREPARING

    def want(self, name: bytes) -> None:
        """Lets the worker prepare the constraint, unless it has or was told to."""
        if self._states.get(name) in (None, _State.UNSURE):
            self.wanted[name] = None

    def take_wanted(self, now: float) -> list[bytes]:
        """Returns the wanted constraints, which the caller sends now."""
        names = list(self.wanted)
        self.wanted.clear()
        for name in names:
            self._states[name], self._due[name] = _State.PREPARING, now + ANSWER_SECONDS
        return names

    def answered(self, name: bytes, *, ok: bool) -> bool:
        """Records the worker's answer. Returns False if the core does not wait for one."""
        if self._states.get(name) is not _State.PREPARING:
            return False
        del self._due[name]
        if ok:
            self._states[name] = _State.READY
        else:
            del self._states[name]
            self._unused.pop(name, None)
        return True

    def knows(self, name: bytes) -> bool:
        """Returns whether the worker has been sent the constraint and may have it."""
        return name in self._states

    def overdue(self, now: float) -> list[bytes]:
        """Returns the constraints whose answers should have come."""
        return [name for name, due in self._due.items() if now >= due]

    def paused(self, seconds: float) -> None:
        """Gives the worker more time, because the scheduler did not run."""
        for name in self._due:
            self._due[name] += seconds

    # Dropping ------------------------------------------------------------------------------------------------------

    def unused(self, name: bytes, last_step: int) -> None:
        """Records that no live request has the constraint. The plans up to `last_step` may name it."""
        self.wanted.pop(name, None)
        if name in self._states:
            self._unused[name] = max(1, last_step)

    def used(self, name: bytes) -> None:
        """Records that a live request has the constraint."""
        self._unused.pop(name, None)

    def take_drops(self, confirmed_step: int) -> list[bytes]:
        """Returns the constraints that the worker is to drop now, because no plan that it still has names them.

        `confirmed_step` is the last step of the generation whose result has arrived. In a new generation it is 0, and
        the worker may still have plans of the old one, so nothing is dropped before the first result. A constraint that
        the worker still prepares waits for the answer, so that this answer is never taken for that of a later order.
        """
        drops = [
            name
            for name, step in self._unused.items()
            if step <= confirmed_step and self._states[name] is not _State.PREPARING
        ]
        for name in drops:
            del self._unused[name], self._states[name]
        return drops

    def reset(self) -> None:
        """Records that the lane was reset: its plans in flight are void, and the worker may have lost constraints."""
        for name, state in self._states.items():
            if state is _State.READY:
                self._states[name] = _State.UNSURE
        self._unused = dict.fromkeys(self._unused, 1)

    def audit(self, used: set[bytes]) -> None:
        """Checks the counts. `used` are the constraints of live requests."""
        preparing = {name for name, state in self._states.items() if state is _State.PREPARING}
        assert set(self._due) == preparing, "an awaited answer has no time, or another has one"
        assert set(self._states) - used == set(self._unused), "a lane keeps a constraint that no request has"
        assert self.wanted.keys() <= used, "a lane wants a constraint that no request has"
