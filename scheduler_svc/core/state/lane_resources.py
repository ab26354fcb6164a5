"""`LaneResources`: what one worker has of the resources that requests need, as the core sees it.

Owns the state of each resource that the worker has been sent, the orders that are due, and when an answer is overdue.
Knows nothing of requests and sources. `TRANSITIONS` lists all moves between states; they are the same for every kind.
"""

from enum import StrEnum

from scheduler_svc.core.messages.resources import Need


class State(StrEnum):
    """The states of a resource on a lane."""

    DROPPED = "dropped"
    """The worker does not have it. So it is at the beginning, too."""
    WANTED = "wanted"
    """It is sent with the plan that is being made. Between two events nothing is in this state."""
    PREPARING = "preparing"
    """The worker was sent it and has not answered."""
    READY = "ready"
    """The worker has prepared it."""
    UNSURE = "unsure"
    """The worker had prepared it before a reset; it is sent again before it is used."""


class Move(StrEnum):
    """The transitions between states."""

    WANT = "want"
    SEND = "send"
    PREPARE = "prepare"
    FAIL = "fail"
    RESET = "reset"
    DROP = "drop"


# Any other combination is a bug and raises AssertionError.
TRANSITIONS: dict[tuple[State, Move], State] = {
    (State.DROPPED, Move.WANT): State.WANTED,
    (State.UNSURE, Move.WANT): State.WANTED,
    (State.WANTED, Move.SEND): State.PREPARING,
    (State.PREPARING, Move.PREPARE): State.READY,
    (State.PREPARING, Move.FAIL): State.DROPPED,
    (State.READY, Move.RESET): State.UNSURE,
    (State.READY, Move.DROP): State.DROPPED,
    (State.UNSURE, Move.DROP): State.DROPPED,
}


class LaneResources:
    """The resources of one lane, by name."""

    def __init__(self) -> None:
        self.wanted: list[Need] = []
        """What the worker is to prepare next, in order. If there is nothing, planning does nothing."""
        # Without those that are dropped.
        self._states: dict[Need, State] = {}
        # When the answer is due.
        self._due: dict[Need, float] = {}
        # Those that no live request needs, and the step of the last plan that may name them, at least 1.
        self._unused: dict[Need, int] = {}

    def state(self, need: Need) -> State:
        """Returns the state of a resource, which may be unknown here."""
        return self._states.get(need, State.DROPPED)

    def is_ready(self, need: Need) -> bool:
        """Returns whether the worker has prepared it."""
        return self._states.get(need) is State.READY

    def move(self, need: Need, move: Move) -> None:
        """Makes a transition. Raises AssertionError if `TRANSITIONS` does not contain it."""
        to = TRANSITIONS.get((self.state(need), move))
        assert to is not None, f"{need.kind} {need.hash.hex()[:16]}: {move} while {self.state(need)}"
        if to is State.DROPPED:
            del self._states[need]
            self._unused.pop(need, None)
        else:
            self._states[need] = to

    def want(self, need: Need) -> None:
        """Lets the worker prepare a resource, unless it has or was already asked to."""
        if (self.state(need), Move.WANT) in TRANSITIONS:
            self.move(need, Move.WANT)
            self.wanted.append(need)

    def take_wanted(self, now: float) -> list[Need]:
        """Takes what is wanted, which the caller sends now."""
        needs, self.wanted = self.wanted, []
        for need in needs:
            self.move(need, Move.SEND)
            self._due[need] = now + need.of_kind.answer_seconds
        return needs

    def answered(self, need: Need, *, ok: bool) -> bool:
        """Records the worker's answer. Returns False if the core does not wait for one."""
        if self.state(need) is not State.PREPARING:
            return False
        del self._due[need]
        self.move(need, Move.PREPARE if ok else Move.FAIL)
        return True

    def overdue(self, now: float) -> list[Need]:
        """Returns the resources with overdue answers."""
        return [need for need, due in self._due.items() if now >= due]

    def paused(self, seconds: float) -> None:
        """Gives the worker more time, because the scheduler did not run."""
        for need in self._due:
            self._due[need] += seconds

    def unused(self, need: Need, last_step: int) -> None:
        """Records that no live request needs the resource. The plans up to `last_step` may name it."""
        if need in self._states:
            self._unused[need] = max(1, last_step)

    def used(self, need: Need) -> None:
        """Records that a live request needs the resource."""
        self._unused.pop(need, None)

    def take_drops(self, confirmed_step: int) -> list[Need]:
        """Takes the resources that the worker is to drop now, because no plan that it still has names them.

        `confirmed_step` is the last step of the generation with a result so far. In a new generation it is 0, and
        the worker may still have plans of the old one, so nothing is dropped before the first result. A resource that
        the worker still prepares waits for the answer, so that this answer is never taken for that of a later order.
        """
        drops = [
            need
            for need, step in self._unused.items()
            if step <= confirmed_step and (self._states[need], Move.DROP) in TRANSITIONS
        ]
        for need in drops:
            self.move(need, Move.DROP)
        return drops

    def reset(self) -> None:
        """Records that the lane was reset: its plans in flight are void, and the worker may have lost resources."""
        for need in [need for need, state in self._states.items() if state is State.READY]:
            self.move(need, Move.RESET)
        self._unused = dict.fromkeys(self._unused, 1)

    def audit(self, used: set[Need]) -> None:
        """Checks the counts. `used` is what live requests need."""
        preparing = {need for need, state in self._states.items() if state is State.PREPARING}
        assert set(self._due) == preparing, "an awaited answer has no time, or another has one"
        assert set(self._states) - used == set(self._unused), "a lane keeps a resource that no request needs"
        assert not self.wanted and State.WANTED not in self._states.values(), "a wanted resource was not sent"
