"""Puts convicted requests into the quarantine, and answers operators who ask for it."""

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineQuery, QuarantineReply, QuarantineRestored
from scheduler_svc.core.quarantine import Entry, Quarantine
from scheduler_svc.core.state.request import Request


class Convictions:
    """Owns the quarantine."""

    def __init__(self, config: CoreConfig, lanes: Lanes) -> None:
        self._lanes = lanes
        self.quarantine = Quarantine(config.quarantine_seconds)

    def take(self, now: float) -> list[tuple[Request, fx.Failure]]:
        """Quarantines the requests that were convicted since the last call. Returns them; the caller ends them."""
        taken: list[tuple[Request, fx.Failure]] = []
        for conviction in self._lanes.suspects.take_convicted():
            request, cause = conviction.request, conviction.cause
            self.quarantine.add(request, cause, now)
            # The deaths are explained, so they were no crash loop.
            self._lanes.crash_loop.confirmed()
            message = f"request {request.request_id}: {cause}"
            taken.append((request, fx.Failure(code=fx.FailureCode.INTERNAL, message=message)))
        return taken

    def restore(self, event: QuarantineRestored, now: float) -> list[fx.Effect]:
        """Continues the quarantine of an earlier process."""
        for entry in event.entries:
            at = now - entry.age_seconds
            self.quarantine.restore(
                Entry(key=entry.key, request_id=entry.request_id, tenant=entry.tenant, at=at, cause=entry.cause)
            )
        return []

    def answer(self, event: QuarantineQuery | ClearQuarantine, now: float) -> list[fx.Effect]:
        """Lists the entries; for a ClearQuarantine those that are left."""
        removed = self.quarantine.clear(event.keys) if isinstance(event, ClearQuarantine) else 0
        entries = self.quarantine.report(now)
        return [QuarantineReply(frontend=event.frontend, query=event.query, entries=entries, removed=removed)]
