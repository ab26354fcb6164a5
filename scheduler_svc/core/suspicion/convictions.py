"""The end of requests that were convicted of killing their workers or making their steps fail."""

from scheduler_svc.core.core import Core, Organ
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.suspicion.quarantine import MAX_ENTRIES


def end_convicted(core: Core, now: float) -> list[fx.Effect]:
    """Ends and quarantines the requests that were convicted of killing their workers or making their steps fail."""
    effects, suspects = list[fx.Effect](), core.suspects
    convicted, suspects.convicted = suspects.convicted, []
    for request, cause in convicted:
        if request.handle not in suspects.handles:
            continue
        core.quarantine.add(request, cause, now)
        # The deaths are explained, so they were no crash loop.
        core.lanes.crash_loop.confirmed()
        message = f"request {request.submit.request_id}: {cause}"
        effects.append(fx.Note(message=f"{message}; it is quarantined"))
        core.end(request, now, failure=fx.Failure(code=fx.FailureCode.INTERNAL, message=message))
    return effects


class Convictions(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Ends the requests that this Tick has convicted so far, so that no plan has them."""
        return end_convicted(self._core, now) if self._core.suspects.convicted else []

    def next_wake(self) -> float | None:
        """Returns when, on the core's clock, the trial stops waiting for another worker; None if it does not wait."""
        return self._core.suspects.waits_until

    def audit(self) -> None:
        """Checks that suspects are live, are held, are in one group each, and run only in their trial, alone."""
        core, queue, suspects = self._core, self._queue, self._core.suspects
        handles = suspects.handles
        assert all(queue.by_handle(handle) for handle in handles), "a suspect is not live"
        assert {request.handle for request in queue if queue.is_held(request)} == handles, "another request is held"
        members = [request.handle for request in suspects.members()]
        grouped = sorted([*members, *(handle for group in suspects.groups for handle in group)])
        assert grouped == sorted(handles), "a suspect is in no group, or in two"
        workers = {request.worker for request in queue if request.row and request.handle in handles}
        assert len(workers) < 2, f"suspects run on {workers}"
        for lane in self._lanes.values():
            for record in lane.in_flight:
                suspects_of_plan = handles.intersection(record.handles.tolist())
                # A request that is not live any more may have been suspected when the plan was made.
                others = [
                    handle for handle in record.handles.tolist() if handle not in handles and queue.by_handle(handle)
                ]
                assert not suspects_of_plan or not others, "a suspect shares a plan with another request"
                assert suspects_of_plan <= set(members), "a suspect runs outside its trial"
                is_here = suspects.trial is not None and suspects.trial.worker == lane.worker
                assert not suspects_of_plan or is_here, "a suspect runs on another lane than its trial"
        assert len(core.quarantine) <= MAX_ENTRIES
