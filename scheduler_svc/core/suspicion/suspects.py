"""The requests that may have killed or hung their worker or made its step fail, and the trial that finds the culprit.

**Suspects.** If a worker dies or hangs, the requests in its plans in flight become suspects; if a step fails, the
requests of that step. A suspect does not wait in the queue. It runs only in a trial. It is cleared when it has a
confirmed token behind all positions that were in flight at the death, which is usually after one or two steps.

**Trials.** Suspects are tried in groups. At any time one group runs, on one lane, in plans that contain no other
request, one plan at a time. So a death names the group, and the position of each of its requests is exact. The requests
in flight at the death of a trial are split into halves, which join the end of the line of groups. Groups that have been
in fewer deaths are therefore tried first: an innocent half is cleared between two deaths of the half with the culprit.
After a failed step the requests that have no token yet are a group of their own.

**Conviction.** A suspect is convicted after `LONE_DEATHS` deaths from the same position in which it ran alone. Between
these deaths another request must have got a token, unless no other can run, because the fault may be the worker's. If a
worker died without the suspect between them, the first one does not count, at most `MAX_DOUBTS` times. One culprit
among n requests causes at most 1 + ceil(log2 n) + 1 deaths, or one failed step more.

Knows requests and records of plans; `schedule/trials.py` chooses the lane.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.lane import Lane, holds
from scheduler_svc.core.state.request import Request
from tandem_contract.plural import numbered

LONE_DEATHS = 2
MAX_DOUBTS = 3
"""A suspect's lone death does not count if another worker died after it without the suspect, this often at most."""


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

    def cause(self, what: str, *, is_step: bool) -> str:
        """Returns why it is convicted after the death or failed step that `what` describes, in one sentence."""
        who = "its step failed" if is_step else "its worker died or hung"
        where = f"{numbered(self.lone_deaths, 'time')} while it ran alone at token {self.lone_position}"
        return f"{who} {where}; the last time: {what}"


@dataclass(slots=True)
class Trial:
    """The group that is tried. Members that were cleared or have ended do not count any more."""

    handles: list[int]
    worker: str = ""
    """The lane that was chosen for it, or empty."""


def halves(requests: Sequence[Request], *, is_step: bool) -> list[list[int]]:
    """Splits suspects into two groups of handles, or one if there is only one suspect.

    Most requests with a failing step fail in their first one, so those without a token form a group after a
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


@dataclass(slots=True)
class Suspects:
    """All suspects. They are live requests, and the queue holds those that wait (`RequestQueue.hold`)."""

    _queue: RequestQueue
    trial: Trial | None = None
    last_loss: tuple[float, int] = (0.0, 0)
    """The last death of a worker with a request in flight: its time, and the number of lanes before it."""
    last_worker: str = ""
    """The lane of the current trial, or of the last one."""
    waits_until: float | None = None
    """When, on the core's clock, the trial stops waiting for another worker. None if it does not wait."""
    is_next: bool = True
    """Whether the next plan of the trial's lane is the trial's. Other requests on the lane get every second plan."""
    num_steps: int = 0
    """Number of confirmed steps with tokens."""
    num_losses: int = 0
    """Number of workers that died with a request in flight."""
    _by_handle: dict[int, Suspect] = field(default_factory=dict[int, Suspect])
    # Groups that wait for their trial, the next one first. They may name requests that have stopped being suspects.
    _groups: deque[list[int]] = field(default_factory=deque[list[int]])
    convicted: list[tuple[Request, str]] = field(default_factory=list[tuple[Request, str]])
    """Requests that `convictions` ends, and why: one sentence."""

    def __len__(self) -> int:
        return len(self._by_handle)

    @property
    def handles(self) -> set[int]:
        return set(self._by_handle)

    @property
    def groups(self) -> list[list[int]]:
        """Handles of the suspects in each group that waits for its trial, the next one first."""
        live_groups = [[handle for handle in group if handle in self._by_handle] for group in self._groups]
        return [group for group in live_groups if group]

    # Deaths and failed steps -----------------------------------------------------------------------------------------

    def is_trial(self, plans: Iterable[SentPlan]) -> bool:
        """Returns whether these plans contain suspects and no other requests."""
        handles = {handle for plan in plans for handle in plan.handles.tolist()}
        return bool(handles) and handles <= self._by_handle.keys()

    def implicate(
        self, lane: Lane, plans: Sequence[SentPlan], what: str, *, is_step: bool, num_lanes: int, now: float
    ) -> None:
        """Makes suspects of the requests of `plans`, oldest first, in which the lane's worker died or a step failed.

        Call it before the lane is reset. `what` says what happened; `num_lanes` is the number of lanes until now.
        """
        ends = {
            handle: end for plan in plans for handle, end in zip(plan.handles.tolist(), plan.ends.tolist(), strict=True)
        }
        # Among several workers, a death that met a request alone before its trial is too weak a sign.
        counts = is_step or num_lanes <= 1 or self.is_trial(plans)
        if not is_step and ends:
            self.num_losses += 1
            self.last_loss = now, num_lanes
        self._end_trial_on(lane.worker, ends.keys())
        requests = [request for request in map(self._queue.by_handle, ends) if request is not None]
        for request in requests:
            known = _known(lane, request)
            suspect = self._suspect(request, known)
            suspect.met(max(known, ends[request.handle]), is_step=is_step, is_alone=len(ends) == 1)
            if len(ends) == 1 and counts and suspect.died_alone(known, self.num_steps, self.num_losses):
                self.convicted.append((request, suspect.cause(what, is_step=is_step)))
        # Suspects run only in their trial, so none of these is in a group that waits.
        self._groups.extend(halves(requests, is_step=is_step))

    def restore(self, requests: Sequence[Request]) -> None:
        """Makes one group of suspects of live requests that wait: those of an earlier service, for example."""
        for request in requests:
            self._suspect(request, request.known).met(request.known, is_step=False, is_alone=False)
        self._groups.append([request.handle for request in requests])

    def _suspect(self, request: Request, known: int) -> Suspect:
        suspect = self._by_handle.get(request.handle)
        if suspect is None:
            suspect = self._by_handle[request.handle] = Suspect(request, known)
            self._queue.hold(request)
        return suspect

    def _end_trial_on(self, worker: str, in_flight: Collection[int]) -> None:
        """Puts the group of a trial on the lost lane back, without its members in flight, which form new groups."""
        trial = self.trial
        if trial is None or trial.worker != worker:
            return
        rest = [handle for handle in trial.handles if handle in self._by_handle and handle not in in_flight]
        if len(rest) == len(trial.handles):
            trial.worker = ""  # its plan was not in flight, so the trial goes on elsewhere
            return
        self.trial = None
        if rest:
            self._groups.append(rest)

    # Clearing --------------------------------------------------------------------------------------------------------

    def confirmed(self, lane: Lane, plan: SentPlan) -> None:
        """Clears the suspects that the result of `plan`, already applied, has carried past their position."""
        if not len(plan.sampled):
            return
        self.num_steps += 1
        for handle in plan.handles[plan.sampled].tolist() if self._by_handle else ():
            suspect = self._by_handle.get(handle)
            if suspect is not None and _known(lane, suspect.request) > suspect.must_pass:
                self._remove(suspect)
                self._queue.release(suspect.request)

    def forget(self, request: Request) -> None:
        """Forgets a request that has ended."""
        suspect = self._by_handle.get(request.handle)
        if suspect is not None:
            self._remove(suspect)

    def _remove(self, suspect: Suspect) -> None:
        del self._by_handle[suspect.request.handle]
        if not self._by_handle:
            self.trial = self.waits_until = None
            self._groups.clear()

    # Trials ----------------------------------------------------------------------------------------------------------

    def next_trial(self, may_run: Callable[[Request], bool]) -> Trial | None:
        """Begins the trial of the first group with a member that may run, unless one goes on. Returns the current one.

        A trial without rows and plans goes back to the groups if no member may run: its lane was lost or admits none,
        and the other workers may be smaller.
        """
        trial, members = self.trial, self.members()
        if trial is not None and not self.is_running() and not any(map(may_run, members)):
            self._groups.append([request.handle for request in members])
            self.trial = None
        elif not members:
            self.trial = None
        if self.trial is not None or not self._by_handle:
            return self.trial
        for _ in range(len(self._groups)):
            group = [self._by_handle[handle] for handle in self._groups.popleft() if handle in self._by_handle]
            handles = [suspect.request.handle for suspect in group]
            if any(may_run(suspect.request) for suspect in group):
                self.trial = Trial(handles)
                return self.trial
            if handles:
                self._groups.append(handles)
        return None

    def _tried(self) -> list[Suspect]:
        handles = () if self.trial is None else self.trial.handles
        return [self._by_handle[handle] for handle in handles if handle in self._by_handle]

    def members(self) -> list[Request]:
        """Returns the requests of the current trial that are not cleared."""
        return [suspect.request for suspect in self._tried()]

    def is_running(self) -> bool:
        """Returns whether a member of the trial has a row, or a plan in flight without one."""
        return any(request.row or request.pending_plans for request in self.members())

    def is_repeated(self) -> bool:
        """Returns whether a member of the trial has been in more than one death, so that a culprit is likely."""
        return any(suspect.deaths > 1 for suspect in self._tried())

    def may_use_cache(self) -> bool:
        """Returns whether the members of the trial may start from cached pages."""
        return all(suspect.trusts_cache for suspect in self._tried())

    def begin_on(self, lane: Lane) -> None:
        """Moves the trial to a lane. Members that the lane can never hold form a group of their own."""
        self.waits_until = None
        trial = self.trial
        assert trial is not None
        fits = {request.handle: holds(lane, request) for request in self.members()}
        rest = [handle for handle, does in fits.items() if not does]
        if rest:
            self._groups.append(rest)
        trial.handles = [handle for handle, does in fits.items() if does]
        self.is_next |= lane.worker != self.last_worker
        trial.worker = self.last_worker = lane.worker

    def lacks_control(self) -> bool:
        """Returns whether a death would meet a lone suspect again, and no other request got a token since the last."""
        tried = self._tried()
        return len(tried) == 1 and tried[0].lone_deaths > 0 and tried[0].control >= self.num_steps

    def waive_control(self) -> None:
        """Records that no other request can run."""
        for suspect in self._tried():
            suspect.control = -1


def _known(lane: Lane, request: Request) -> int:
    """Returns the number of tokens that the core knows of a request in a plan of the lane."""
    return int(lane.rows.known[request.row]) if request.row and request.worker == lane.worker else request.known
