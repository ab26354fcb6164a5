"""Why each request waits; sends the reason to the caller of a request without progress, when it changes.

`Waits` looks at all requests once a second, and at once when the service begins or stops to compute. So a caller gets
at most one message a second, and steps cost nothing. A reason that usually lasts a moment is sent after `LOOK_SECONDS`.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.reports import NotServing, WaitReason
from scheduler_svc.core.messages.resources import Need, named
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import OVERDUE_SECONDS, Lane
from scheduler_svc.core.state.lane_phase import LanePhase
from scheduler_svc.core.state.lane_resources import State
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.status import Availability

LOOK_SECONDS = 1.0
Why = tuple[WaitReason, str]
_PATIENT = (WaitReason.TENANT_SHARE, WaitReason.PREEMPTED, WaitReason.QUEUE)
_SUSPECT: Why = WaitReason.SUSPECT, "it was running when a worker died or a step failed, and waits for its trial"
_TENANT_SHARE: Why = WaitReason.TENANT_SHARE, "its tenant has all rows of its share"
_COMPUTING: Why = WaitReason.COMPUTING, "it runs: its prompt and its output so far are computed"


class _Known(NamedTuple):
    """What is known of a request at the last look, and which reason its caller got. Times are on the core's clock."""

    reader: tuple[str, int]
    """Its front end and its first stream: another reader has got no reason yet."""
    waits: bool
    since: float
    """When it began to wait."""
    sent: Why | None = None
    sent_at: float = float("-inf")
    tokens: int = 0
    """The number of its known tokens at `sent_at`."""


@dataclass(slots=True)
class Waits:
    """Reads the queue and the lanes, and changes neither."""

    _queue: RequestQueue
    _lanes: Lanes
    _availability: Availability
    # By the id of the request: those that wait, or got a reason within the last second.
    _known: dict[str, _Known] = field(default_factory=dict[str, _Known])
    # On the core's clock.
    _look_at: float = float("-inf")
    _seen: NotServing | None = None
    # The reasons of most requests that wait, with the numbers of the last look.
    _queued: Why = (WaitReason.QUEUE, "other requests have the rows")
    _preempted: Why = (WaitReason.PREEMPTED, "other requests have the room")
    # The number of waiting requests that need no further reason as long as only time passes.
    _num_settled: int = 0

    def next_wake(self) -> float | None:
        """Returns the core's time [s] when `tell` must be called at the latest, None if nothing is due."""
        waiting = self._queue.num_waiting
        return self._look_at if waiting and waiting != self._num_settled else None

    def tell(self, frontends: Container[str], now: float) -> list[fx.Effect]:
        """Sends callers the reasons why their requests wait, if that is due."""
        blocked = self._availability.blocked
        if now < self._look_at and blocked is self._seen:
            return []
        self._look_at, self._seen = now + LOOK_SECONDS, blocked
        lanes = self._lanes.values()
        has_paused = any(lane.rows.num_awaiting or self._pause(lane, now) for lane in lanes if lane.rows.num_seated)
        if not (self._queue.num_waiting or self._known or has_paused):
            return []
        others = f"({len(self._queue) - self._queue.num_waiting} running, {self._queue.num_waiting} waiting)"
        self._queued = WaitReason.QUEUE, f"other requests have the rows {others}"
        self._preempted = WaitReason.PREEMPTED, f"it gave up its row, and other requests have the room {others}"
        reads_rows, entries, settled = has_paused or bool(self._known), dict[str, _Known](), 0
        # By front end and reason: streams, and their seconds.
        waits = dict[str, dict[Why, list[tuple[int, float]]]]()
        for request in self._queue:
            if (request.row and not reads_rows) or not self._speaks(request):
                settled += not request.row
                continue
            entry, why = self._look(request, now)
            if entry is None:
                continue
            if why is not None and request.frontend in frontends and self._is_due(entry, why, request, now):
                entry = self._sent(entry, why, request, now)
                of_reason = waits.setdefault(request.frontend, {}).setdefault(why, [])
                of_reason.append((request.stream, now - entry.since))
            settled += not request.row and (why is None or _is_same(entry.sent, why) or not request.frontend)
            entries[request.submit.request_id] = entry
        for request_id, entry in self._known.items():
            # Kept until the caller may get a further reason.
            if request_id not in entries and now - entry.sent_at < LOOK_SECONDS:
                entries[request_id] = entry._replace(waits=False, sent=None)
        self._known, self._num_settled = entries, settled
        return [
            fx.Waits(frontend=frontend, waits=tuple(_wait(why, waited) for why, waited in of_frontend.items()))
            for frontend, of_frontend in waits.items()
        ]

    def last_word(self, request: Request, now: float) -> list[fx.Effect]:
        """Sends the caller of a request that ends without a token why it waited, if it does not know."""
        entry, why = self._look(request, now)
        if entry is None or why is None or not request.frontend or not self._speaks(request):
            return []
        if self._lanes.known(request) > request.prompt_tokens or now - entry.sent_at < LOOK_SECONDS:
            return []
        # Its other samples end now, too, and need not send it.
        self._known[request.submit.request_id] = self._sent(entry, why, request, now)
        return [fx.Waits(frontend=request.frontend, waits=(_wait(why, [(request.stream, now - entry.since)]),))]

    def named(self, request: Request, now: float) -> str:
        """Returns the end of a sentence about a request that ends: what it was waiting for; empty if it runs."""
        why = self.why(request, now)
        return "" if why is None else f"; it was waiting: {why[1]}"

    # Reasons ---------------------------------------------------------------------------------------------------------

    def why(self, request: Request, now: float) -> Why | None:
        """Returns why the request makes no progress, None if it does."""
        if request.row:
            lane = self._lanes[request.worker]
            awaited = (need.of_kind.wait for need in request.needs if not lane.resources.is_ready(need))
            return self._pause(lane, now) or next(awaited, None)
        if (blocked := self._availability.blocked) is not None:
            return blocked.reason, blocked.message
        queue = self._queue
        if request.worker_wait_since is not None:
            return self._no_large_worker(request)
        if queue.is_held(request):
            return _SUSPECT
        if (need := next(filter(self._is_awaited, request.needs), None)) is not None:
            return need.of_kind.wait
        if queue.tenants[request.submit.tenant].is_parked:
            return _TENANT_SHARE
        return self._preempted if request.admitted_at is not None else self._queued

    def _pause(self, lane: Lane, now: float) -> Why | None:
        """Returns why the rows of a lane pause."""
        if lane.phases.is_loading:
            return WaitReason.LOADING_WEIGHTS, f"its worker loads weights {lane.weights.ordered.version!r}"
        if lane.phases.stay in (LanePhase.HANDING_OVER, LanePhase.DISMISSED):
            return WaitReason.WORKERS_LEAVING, "its worker is drained, and a standby worker takes it over"
        if lane.is_overdue(now):
            return WaitReason.SLOW_STEP, f"its worker has taken longer than {OVERDUE_SECONDS:g} s for one step"
        return None

    def _no_large_worker(self, request: Request) -> Why:
        infos = self._lanes.worker_infos
        longest = infos.longest_present_for(request.needs)
        takes = f" and take {named(request.needs)}" if request.needs else ""
        message = f"its {request.size} need a larger worker; those that are present{takes} hold at most {longest}"
        return WaitReason.NO_LARGE_WORKER, message

    def _is_awaited(self, need: Need) -> bool:
        """Whether a worker prepares a resource now, and none has prepared it."""
        states = [lane.resources.state(need) for lane in self._lanes.serving]
        return State.PREPARING in states and State.READY not in states

    # The rule of telling ---------------------------------------------------------------------------------------------

    def _speaks(self, request: Request) -> bool:
        """Whether this sample gets the reason of the request: it is the first one that lives, and no other runs."""
        siblings = self._queue.by_request_id(request.submit.request_id)
        return siblings[0] is request and (bool(request.row) or not any(one.row for one in siblings))

    def _look(self, request: Request, now: float) -> tuple[_Known | None, Why | None]:
        """Returns what is known of the request now, None if nothing needs to be; and why it waits."""
        entry, why = self._known.get(request.submit.request_id), self.why(request, now)
        reader = request.frontend, request.stream - request.sample_idx
        if entry is not None and entry.reader != reader:
            entry = None
        if why is None:
            if entry is not None and entry.sent is not None and self._lanes.known(request) == entry.tokens:
                return entry, _COMPUTING
            return None, None
        if entry is None or not entry.waits:
            sent_at = float("-inf") if entry is None else entry.sent_at
            since = request.arrived_at if request.admitted_at is None else now
            entry = _Known(reader=reader, waits=True, since=since, sent_at=sent_at)
        return entry, why

    def _is_due(self, entry: _Known, why: Why, request: Request, now: float) -> bool:
        is_patient = why[0] in _PATIENT and now - entry.since < LOOK_SECONDS
        return not _is_same(entry.sent, why) and not is_patient and now - entry.sent_at >= LOOK_SECONDS

    def _sent(self, entry: _Known, why: Why, request: Request, now: float) -> _Known:
        return entry._replace(waits=True, sent=why, sent_at=now, tokens=self._lanes.known(request))


def _wait(why: Why, waited: Sequence[tuple[int, float]]) -> fx.Wait:
    streams, seconds = zip(*waited, strict=True)
    return fx.Wait(reason=why[0], message=why[1], streams=streams, seconds=seconds)


def _is_same(sent: Why | None, why: Why) -> bool:
    """Whether the reason is not news. The numbers of other requests change constantly, and are no news."""
    return sent is not None and sent[0] is why[0] and (sent == why or why[0] in _PATIENT)
