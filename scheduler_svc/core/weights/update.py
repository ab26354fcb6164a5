"""One update of weights: what was asked, who watches it, and how far it is."""

from collections.abc import Collection
from dataclasses import dataclass, field

from scheduler_svc.core.messages.operators import Running, Weights
from scheduler_svc.core.messages.reports import UpdateState, WeightsReport
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane

REPORT_SECONDS = 1.0
MAX_LOSSES = 2


@dataclass(slots=True, kw_only=True)
class Update:
    """An update from its acceptance to its final report."""

    weights: Weights
    running: Running
    in_turn: bool
    began_at: float
    ends_at: float
    state: UpdateState = UpdateState.UPDATING
    detail: str = "the first worker loads the weights"
    is_committed: bool = False
    """Whether a worker has loaded the weights, so that all others will."""
    num_lost: int = 0
    """Workers that were lost while they loaded before another one had."""
    first: int = 0
    """Number of the lane that loads first."""
    watchers: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Front end and query of each operator."""
    reports_at: float = 0.0
    reported: tuple[UpdateState, int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the state is final."""
        return self.state is not UpdateState.UPDATING

    def end(self, state: UpdateState, detail: str) -> None:
        """Ends the update."""
        self.state, self.detail = state, detail

    def reports(
        self, lanes: Collection[Lane], queue: RequestQueue, frontends: Collection[str], now: float
    ) -> list[WeightsReport]:
        """Returns a report for each watcher, once a second and at each change."""
        self.watchers = {watcher for watcher in self.watchers if watcher[0] in frontends}
        updated = sum(lane.info.weights_version == self.weights.version for lane in lanes)
        if not self.watchers or (now < self.reports_at and self.reported == (self.state, updated)):
            return []
        self.reports_at, self.reported = now + REPORT_SECONDS, (self.state, updated)
        return [
            WeightsReport(
                frontend=frontend,
                query=query,
                version=self.weights.version,
                state=self.state,
                workers=len(lanes),
                workers_updated=updated,
                running=len(queue) - queue.num_waiting,
                waiting=queue.num_waiting,
                seconds=now - self.began_at,
                detail=self.detail,
            )
            for frontend, query in sorted(self.watchers)
        ]
