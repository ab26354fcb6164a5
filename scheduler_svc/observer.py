"""The observers of the core's loop: the event log, the flight recorder, the journal, the steps file, the metrics.

An observer sees what comes to the core and what follows from it. It decides nothing. What it does not override, it does
not want to know.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev


class Observer:
    """`now` is on the core's clock. All methods are called in the loop's thread, in the order below."""

    def arrived(self, now: float, event: ev.Event, entry: Mapping[str, Any]) -> None:
        """The core is about to handle an event; `entry` has its fields in `RecordedEvent`."""

    def handled(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """The core has handled the event, with these effects."""

    def sending(self, now: float) -> None:
        """The core has handled all events of a turn. Nothing of their effects has left this process."""

    def turned(self, began: float) -> None:
        """The effects of the turn that began then were sent."""

    def checked(self, now: float) -> None:
        """About once a second."""
