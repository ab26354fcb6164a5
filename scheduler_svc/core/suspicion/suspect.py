"""What the core knows against one suspect, the trial of a group, and a conviction. `suspects.py` explains them."""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.state.request import Request

LONE_DEATHS = 2
MAX_DOUBTS = 3
"""A suspect's lone death does not count if another worker died after it without the suspect, at most so many times."""


@dataclass(slots=True)
class Suspect:
    """What is known against one request."""

    request: Request
    must_pass: int
    """The suspect is cleared when it has more known tokens than this."""
    deaths: int = 0
    """Deaths and failed steps in which it was in flight, since it became a suspect."""
    trusts_cache: bool = True
    """Whether cached pages may be reused. They could be what kills the worker or makes the step fail.

    So they may be reused only after a single death, and after failed steps until one met it alone. The worker of a
    failed step keeps its pages, and computing those of all suspects again would take much longer than their trials.
    """
    lone_deaths: int = 0
    """How many of them, the last ones in a row, met it alone at `lone_position`."""
    lone_position: int = -1
    """Its number of known tokens at the last death that met it alone."""
    control: int = 0
    """`Suspects.num_steps` at that death, or -1 if no other request can run."""
    num_losses: int = 0
    """`Suspects.num_losses` at that death."""
    doubts: int = 0
    """How often lone deaths were not counted because workers died without the suspect, too."""

    def met(self, must_pass: int, *, is_step: bool, is_alone: bool) -> None:
        """Records a death or a failed step."""
        self.deaths += 1
        self.trusts_cache = self.trusts_cache and not is_alone if is_step else self.deaths == 1
        self.must_pass = max(self.must_pass, must_pass)

    def died_alone(self, known: int, num_steps: int, num_losses: int) -> bool:
        """Records that the death, which `num_losses` counts, met it alone at `known` tokens.

        Returns whether it is convicted.
        """
        has_control = self.control < num_steps
        if known != self.lone_position:
            self.lone_position, self.lone_deaths, has_control = known, 0, True
        elif num_losses - self.num_losses > 1 and self.doubts < MAX_DOUBTS:
            # Workers die without it as well, so its deaths may have been the same accident.
            self.doubts += 1
            self.lone_deaths = 0
        self.num_losses = num_losses
        self.lone_deaths += has_control
        self.control = num_steps
        return self.lone_deaths >= LONE_DEATHS

    def conviction(self, what: str, *, is_step: bool) -> "Conviction":
        """Returns the conviction after the death or failed step that `what` describes."""
        who = "its step failed" if is_step else "its worker died or hung"
        where = f"{self.lone_deaths} times while it ran alone at token {self.lone_position}"
        return Conviction(request=self.request, cause=f"{who} {where}; the last time: {what}")


@dataclass(slots=True)
class Trial:
    """The group that is tried. Members that were cleared or have ended do not count any more."""

    handles: list[int]
    worker: str = ""
    """The lane that was chosen for it, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conviction:
    """A request that must end, and why: one sentence."""

    request: Request
    cause: str


@dataclass(slots=True)
class Loss:
    """The last death of a worker with a request in flight."""

    at: float = 0.0
    num_lanes: int = 0
    """Number of lanes before it."""


def halves(requests: Sequence[Request], *, is_step: bool) -> list[list[int]]:
    """Splits suspects into two groups of handles, or one if there is only one suspect.

    A request whose step fails mostly fails its first one, so those without a token form a group of their own after a
    failed step. The others are then cleared in one trial.
    """
    handles = [request.handle for request in requests]
    half = (len(handles) + 1) // 2
    groups = [handles[:half], handles[half:]]
    if is_step:
        new = [request.handle for request in requests if not request.num_outputs]
        if 0 < len(new) < len(handles):
            groups = [[handle for handle in handles if handle not in new], new]
    return [group for group in groups if group]
