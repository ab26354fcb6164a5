"""The last steps and events of the core, in short form, in memory of a fixed number of entries.

Owns two rings, because steps come hundreds of times a second and would push out joins and losses. A rejection that
follows one with the same code is counted in its entry, so a flood of refused requests pushes out nothing either.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.recording.flight.short_forms import EFFECTS, EVENTS, MAX_TEXT, NAMES, end_of


def cause_of(one: Any) -> str | None:
    """Returns a sentence if an event or effect is the death of a worker or a front end."""
    match one:
        case ev.WorkerLost(is_orderly=False):
            return f"worker {one.worker} was lost"
        case ev.FrontendLost():
            return f"front end {one.frontend} was lost"
        case fx.KillWorker():
            return f"worker {one.worker} hangs"
        case _:
            return None


def cause_of_end(frontend: str, end: fx.End) -> str | None:
    """Returns a sentence if the service is to blame for the end: the request killed its workers, say."""
    if end.failure is None or end.failure.code is not fx.FailureCode.INTERNAL:
        return None
    return f"a request of {frontend or 'no front end'} failed, stream {end.stream}"


NUM_STEPS, NUM_EVENTS = 4096, 2048
# Token ids of one entry, if tokens are kept.
MAX_TOKENS = 256

# The core's time, a kind, and the values with the names in NAMES.
Entry = Sequence[Any]


class Ring:
    """`keep_tokens`: whether entries with token ids of prompts and outputs are added."""

    def __init__(self, *, keep_tokens: bool = False, num_steps: int = NUM_STEPS, num_events: int = NUM_EVENTS) -> None:
        # Sentences for deaths among the events; the owner takes them.
        self.deaths: list[str] = []
        self._keep_tokens = keep_tokens
        self._steps: deque[Entry] = deque(maxlen=num_steps)
        self._events: deque[Entry] = deque(maxlen=num_events)
        # The newest entry of the events if it is a rejection.
        self._rejection: list[Any] | None = None

    def add(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """Adds an event that the core has handled, and its effects. Takes less than 2 us per step of the worker."""
        if isinstance(event, ev.StepDone):
            self._steps.append(
                (
                    now, "result", event.worker, event.generation, event.step, event.status, event.compute_us,
                    len(event.tokens), event.detail and event.detail[:MAX_TEXT],
                )
            )  # fmt: skip
        elif type(event) in EVENTS:
            self._add_event(now, event, effects)
        for effect in effects:
            if isinstance(effect, fx.SendPlan):
                plan = effect.plan
                # Their sum is made when the entry is read: it would cost more than all the rest here.
                chunks = plan.chunk_counts
                self._steps.append(
                    (
                        now, "plan", effect.worker, plan.generation, plan.step, len(plan.starts),
                        chunks.tobytes() if len(chunks) else b"", len(plan.decode_rows),
                    )
                )  # fmt: skip
            elif isinstance(effect, fx.StepOutput):
                if effect.ends or self._keep_tokens:
                    self._add_output(now, effect)
            else:
                self._add_effect(now, effect)

    def entries(self) -> list[Entry]:
        """Returns all entries in the order of their times."""
        return sorted([*self._steps, *map(tuple, self._events)], key=lambda entry: entry[0])

    def _add(self, now: float, short: tuple[Any, ...], cause: str | None) -> None:
        self._events.append((now, *short))
        self._rejection = None
        if cause is not None:
            self.deaths.append(cause)

    def _add_event(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        if len(effects) == 1 and isinstance(effects[0], fx.Rejected):
            return
        self._add(now, EVENTS[type(event)](event), cause_of(event))
        if self._keep_tokens and isinstance(event, ev.Submit):
            self._add(now, ("prompt", event.frontend, event.stream, _first(event.prompt)), None)

    def _add_effect(self, now: float, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Rejected):
            self._add_rejection(now, effect)
        elif type(effect) in EFFECTS:
            self._add(now, EFFECTS[type(effect)](effect), cause_of(effect))

    def _add_output(self, now: float, output: fx.StepOutput) -> None:
        for end in output.ends:
            self._add(now, end_of(output.frontend, end), cause_of_end(output.frontend, end))
        if self._keep_tokens and len(output.tokens):
            self._steps.append((now, "output", output.frontend, _first(output.streams), _first(output.tokens)))

    def _add_rejection(self, now: float, rejected: fx.Rejected) -> None:
        last = self._rejection
        if last is not None and last[2] == rejected.code and last[3] == rejected.field:
            last[4] += 1
            last[5] = now
            return
        self._rejection = [now, "rejected", rejected.code, rejected.field, 1, now]
        self._events.append(self._rejection)


def members(entry: Entry) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of an entry."""
    at, kind, *values = entry
    yield "at", at
    yield "kind", kind
    for name, value in zip(NAMES[kind], values, strict=True):
        yield name, int(np.frombuffer(value, np.int32).sum()) if isinstance(value, bytes) else value


def _first(values: npt.NDArray[Any]) -> list[int]:
    return np.asarray(values[:MAX_TOKENS]).tolist()
