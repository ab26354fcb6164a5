"""The last steps and events of the core, in short form, in memory of a fixed number of entries.

Owns two rings, because steps come hundreds of times a second and would push out joins and losses. A rejection that
follows one with the same code is counted in its entry, so a flood of refused requests pushes out nothing either.

Owns also what is kept of each event and effect: a kind and a few values. A short form has names, numbers and reasons.
It refers to no array and no message, so its size is bounded by that of ids and of texts that are cut.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.ends import Resumed

# Of a reason or detail, which another program may have written.
MAX_TEXT = 300

NAMES: dict[str, tuple[str, ...]] = {
    "plan": ("worker", "generation", "step", "starts", "prefill_tokens", "decode_rows"),
    "result": ("worker", "generation", "step", "status", "compute_us", "tokens", "detail"),
    "submit": ("frontend", "stream", "request_id", "prompt_tokens", "max_new_tokens", "samples", "traceparent"),
    "rejected": ("code", "field", "count", "until"),
    "end": ("frontend", "stream", "outcome", "output_tokens", "preemptions", "worker_changes", "seconds"),
    "resume": ("frontend", "stream", "request_id"),
    "restored": ("request_id",),
    "cancel": ("frontend", "stream", "detach"),
    "finish": ("frontend", "stream", "output_tokens"),
    "abort": ("frontend", "requests"),
    "flush": ("frontend",),
    "clear_quarantine": ("frontend", "keys"),
    "frontend_joined": ("frontend",),
    "frontend_lost": ("frontend",),
    "worker_joined": ("worker", "pid", "pages", "rows", "device"),
    "worker_lost": ("worker", "reason", "is_orderly"),
    "paused": ("seconds",),
    "drain_started": (),
    "drain_ended": (),
    "tenants": ("count",),
    "update_weights": ("frontend", "version", "running"),
    "weights_loaded": ("worker", "version", "ok", "detail"),
    "weights_restored": ("version",),
    "constraint_ready": ("worker", "hash", "error"),
    "prepare_constraint": ("worker", "hash", "bytes"),
    "drop_constraint": ("worker", "hash"),
    "load_weights": ("worker", "version", "keep_rows"),
    "accepted": ("worker", "generation", "keeps_pages"),
    "proven": ("worker", "was_standby"),
    "refused": ("worker", "reason", "retry"),
    "ask_rejoin": ("worker",),
    "kill": ("worker",),
    "note": ("message",),
    "resumed": ("frontend", "stream", "request_id"),
    "replaced": ("frontend", "stream"),
    "prompt": ("frontend", "stream", "token_ids"),
    "output": ("frontend", "streams", "token_ids"),
}
"""The names of each kind's values."""

Short = tuple[Any, ...]

EVENTS: dict[type[Any], Callable[[Any], Short]] = {
    ev.Submit: lambda one: (
        "submit", one.frontend, one.stream, one.request_id, len(one.prompt), one.max_new_tokens, one.num_samples,
        one.traceparent,
    ),
    ev.Resume: lambda one: ("resume", one.frontend, one.stream, one.request_id),
    ev.Restored: lambda one: ("restored", one.submit.request_id),
    ev.Cancel: lambda one: ("cancel", one.frontend, one.stream, one.detach),
    ev.Finish: lambda one: ("finish", one.frontend, one.stream, one.output_tokens),
    ev.Abort: lambda one: ("abort", one.frontend, len(one.request_ids)),
    ev.FlushCache: lambda one: ("flush", one.frontend),
    ev.ClearQuarantine: lambda one: ("clear_quarantine", one.frontend, len(one.keys)),
    ev.FrontendJoined: lambda one: ("frontend_joined", one.frontend),
    ev.FrontendLost: lambda one: ("frontend_lost", one.frontend),
    ev.WorkerJoined: lambda one: (
        "worker_joined", one.worker, one.info.pid, one.info.num_pages, one.info.max_rows, one.info.device[:MAX_TEXT],
    ),
    ev.WorkerLost: lambda one: ("worker_lost", one.worker, one.reason[:MAX_TEXT], one.is_orderly),
    ev.Paused: lambda one: ("paused", one.seconds),
    ev.DrainStarted: lambda one: ("drain_started",),
    ev.DrainEnded: lambda one: ("drain_ended",),
    ev.TenantsChanged: lambda one: ("tenants", len(one.limits)),
    ev.UpdateWeights: lambda one: ("update_weights", one.frontend, one.weights.version, one.running.value),
    ev.WeightsLoaded: lambda one: ("weights_loaded", one.worker, one.version, one.ok, one.detail[:MAX_TEXT]),
    ev.ConstraintReady: lambda one: ("constraint_ready", one.worker, one.hash.hex()[:16], one.error[:MAX_TEXT]),
    ev.WeightsRestored: lambda one: ("weights_restored", one.weights.version),
}  # fmt: skip
"""The short forms of events. Those of steps are in `ring`; heartbeats, ticks and queries are not kept."""

EFFECTS: dict[type[Any], Callable[[Any], Short]] = {
    fx.WorkerAccepted: lambda one: ("accepted", one.worker, one.generation, one.keeps_pages),
    fx.WorkerProven: lambda one: ("proven", one.worker, one.was_standby),
    fx.WorkerRefused: lambda one: ("refused", one.worker, one.reason[:MAX_TEXT], one.retry),
    fx.AskRejoin: lambda one: ("ask_rejoin", one.worker),
    fx.KillWorker: lambda one: ("kill", one.worker),
    fx.LoadWeights: lambda one: ("load_weights", one.worker, one.weights.version, one.keep_rows),
    fx.PrepareConstraint: lambda one: ("prepare_constraint", one.worker, one.hash.hex()[:16], len(one.source)),
    fx.DropConstraint: lambda one: ("drop_constraint", one.worker, one.hash.hex()[:16]),
    fx.Note: lambda one: ("note", one.message[:MAX_TEXT]),
    Resumed: lambda one: ("resumed", one.frontend, one.stream, one.request_id),
    fx.Replaced: lambda one: ("replaced", one.frontend, one.stream),
}
"""The short forms of effects, except plans, rejections and ends (`ring`)."""


def end_of(frontend: str, end: fx.End) -> Short:
    """Returns the short form of a sample's end."""
    if end.failure is not None:
        outcome = f"failed: {end.failure.code}"
    else:
        outcome = "" if end.reason is None else end.reason.value
    stats = end.stats
    values = (outcome, stats.output_tokens, stats.preemptions, stats.worker_changes, stats.total_seconds)
    return ("end", frontend, end.stream, *values)


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
