"""What planning knows of one lane between plans, and which weights its worker was asked to load.

`LaneSchedule` keeps what earlier plans found out, `LaneWeights` what `operations/weights.py` ordered
last.
"""

from dataclasses import dataclass

from scheduler_svc.core.messages.operators import Running, Weights

FIRST_SHARE, SHARE_DECAY, SHARE_RAISE = 0.3, 0.998, 0.005
"""The expected share at the start, its factor per planned step, and what a step with a preemption adds to it.

A higher share preempts less but admits fewer requests. core/README.md has the figures."""
MAX_LOOKUPS = 64
_NOTHING = Weights(version="", folder="")


class LaneSchedule:
    """A lane's scheduling data. A reset of the lane keeps only the expected share."""

    def __init__(self) -> None:
        self.expected_share = FIRST_SHARE
        """Share of its remaining output tokens that a running request is expected to produce, at most 1. It decides how
        many pages stay free when a request is admitted (`policy.headroom`)."""
        self.has_preempted = False
        """Whether a request was preempted since the last planned step: the expected share was too small."""
        self.blocked: tuple[int, int] | None = None
        """The request at the head of the queue that does not fit, by handle, and the pool's counter of releases then:
        the lane does not check it again before pages are released. With handle 0 other lanes see this lane as blocked,
        but it checks the head again when it next plans."""
        self.lookups: dict[tuple[int, int], int] = {}
        """By handle and known tokens: how many cached pages the lane has of a request, if it has a window. Valid until
        it plans or is answered."""

    def reset(self) -> None:
        """Drops the data that depends on the lane's rows and cached pages."""
        self.blocked = None
        self.lookups.clear()

    def step_planned(self) -> None:
        """Updates the expected share, once per planned step, so that it does not decay while the core is idle."""
        if self.has_preempted:
            self.expected_share = min(1.0, self.expected_share + SHARE_RAISE)
        else:
            self.expected_share *= SHARE_DECAY
        self.has_preempted = False


@dataclass(slots=True)
class LaneWeights:
    """The weights that the worker was last asked to load. The phase of the lane says whether it has answered."""

    ordered: Weights = _NOTHING
    running: Running = Running.RECOMPUTE
    """What happens to the lane's requests when it has."""
    until: float = 0.0
    """A worker that has not answered by this time on the core's clock is given up."""
    retry_at: float = 0.0
    """After a refusal: the time on the core's clock when the worker is asked again; 0 from then on."""
    refusal: str = ""
    """Why the worker could not load."""
