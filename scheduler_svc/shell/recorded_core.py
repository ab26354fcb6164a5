"""The scheduler behind the event log. Owns the order: an event is written before the core handles it."""

import time
from typing import Any

from tandem.internal.v1 import record_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.event_log import Recorder


class RecordedCore:
    """The only caller of `Scheduler.handle`; others read `scheduler` and do not change it."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder | None) -> None:
        self.scheduler = scheduler
        self._recorder = recorder

    def handle(self, event: ev.Event, **entry: Any) -> list[fx.Effect]:
        """Passes the event to the core at the current time. `entry` has the event's fields in record.proto."""
        now = time.monotonic()
        if self._recorder is None:
            return self.scheduler.handle(event, now)
        self._recorder.add_event(record_pb2.RecordedEvent(now=now, **entry))
        effects = self.scheduler.handle(event, now)
        self._recorder.add_effects(effects)
        return effects

    def flush_record(self) -> None:
        """Passes the events so far to the operating system, so that they outlive this process."""
        if self._recorder is not None:
            self._recorder.flush()
