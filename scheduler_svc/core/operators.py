"""What operators ask of the core as it is: its load, and that its cache is flushed."""

from scheduler_svc.core.core import Core, Organ
from scheduler_svc.core.lanes import flush
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.events import FlushCache, LoadQuery
from scheduler_svc.core.status import load_of


class Operators(Organ):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.handlers = {LoadQuery: self._load, FlushCache: self._flush}

    def _load(self, event: LoadQuery, now: float) -> list[fx.Effect]:
        version = "" if self._core.weights is None else self._core.weights.version
        load = load_of(self._lanes, self._queue, version, now)
        return [fx.LoadReply(frontend=event.frontend, query=event.query, load=load)]

    def _flush(self, event: FlushCache, now: float) -> list[fx.Effect]:
        return [fx.FlushReply(frontend=event.frontend, query=event.query, pages=flush(self._lanes))]
