"""What operators ask of the core as it is: its load, flushes of its cache, its quarantine."""

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import FlushCache, LoadQuery
from scheduler_svc.core.messages.operators import ClearQuarantine, QuarantineQuery, QuarantineReply, QuarantineRestored
from scheduler_svc.core.quarantine import Entry
from scheduler_svc.core.status import load_of


class Operators(Organ):
    @handles(LoadQuery)
    def _load(self, event: LoadQuery, now: float) -> list[fx.Effect]:
        version = "" if self._core.weights is None else self._core.weights.version
        load = load_of(self._lanes, self._queue, version, now)
        return [fx.LoadReply(frontend=event.frontend, query=event.query, load=load)]

    @handles(FlushCache)
    def _flush(self, event: FlushCache, now: float) -> list[fx.Effect]:
        """Evicts all cached pages, also those of lost workers."""
        count = self._core.held_pools.evict_all()
        for lane in self._lanes.values():
            lane.schedule.clear_lookups()
            lane.pages.labels.forget()
            count += lane.pool.evict_all() + lane.host.evict_all()
        return [fx.FlushReply(frontend=event.frontend, query=event.query, pages=count)]

    @handles(QuarantineRestored)
    def _quarantine_restored(self, event: QuarantineRestored, now: float) -> list[fx.Effect]:
        """Continues the quarantine of an earlier process."""
        for entry in event.entries:
            at = now - entry.age_seconds
            self._core.quarantine.restore(
                Entry(key=entry.key, request_id=entry.request_id, tenant=entry.tenant, at=at, cause=entry.cause)
            )
        return []

    @handles(QuarantineQuery, ClearQuarantine)
    def _quarantine(self, event: QuarantineQuery | ClearQuarantine, now: float) -> list[fx.Effect]:
        """Lists the entries; for a ClearQuarantine those that are left."""
        quarantine = self._core.quarantine
        removed = quarantine.clear(event.keys) if isinstance(event, ClearQuarantine) else 0
        entries = quarantine.report(now)
        return [QuarantineReply(frontend=event.frontend, query=event.query, entries=entries, removed=removed)]
