"""The last steps and events of the core, in short form, in memory of a fixed number of entries.

Owns two rings, because steps come hundreds of times a second and would push out joins and losses. A rejection that
follows one with the same code is counted in its entry, so a flood of refused requests pushes out nothing either.

Owns also what is kept of each event and effect: a kind and a few values. A short form has names, numbers and reasons.
It refers to no array and no message, so its size is bounded by that of ids and of texts that are cut.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev

# The longest reason or detail, which another program may have written.
MAX_TEXT = 300

NAMES: dict[str, tuple[str, ...]] = {
    "plan": ("worker", "generation", "step", "starts", "prefill_tokens", "decode_rows"),
    "result": ("worker", "generation", "step", "status", "compute_us", "tokens", "detail"),
    "rejected": ("code", "field", "count", "until"),
    "end": ("frontend", "stream", "outcome", "output_tokens", "preemptions", "worker_changes", "seconds"),
    "prompt": ("frontend", "stream", "token_ids"),
    "output": ("frontend", "streams", "token_ids"),
}
"""The names of each kind's values; `_form` adds those of other kinds."""

Short = tuple[Any, ...]


def _form(kind: str, names: str, **made: Callable[[Any], Any]) -> Callable[[Any], Short]:
    """Makes a short form: its values are attributes of these names, or what a function of the name makes."""
    NAMES[kind] = tuple(names.split())
    getters = [made.get(name) or attrgetter(name) for name in NAMES[kind]]
    return lambda one: (kind, *(get(one) for get in getters))


def _text(name: str) -> Callable[[Any], str]:
    return lambda one: getattr(one, name)[:MAX_TEXT]


def _size(name: str) -> Callable[[Any], int]:
    return lambda one: len(getattr(one, name))


def _hash(one: Any) -> str:
    return one.hash.hex()[:16]


_SUBMIT = "frontend stream request_id prompt_tokens max_new_tokens samples traceparent"
_SIZES = {"pid": attrgetter("info.pid"), "pages": attrgetter("info.num_pages"), "rows": attrgetter("info.max_rows")}
_VERSION = attrgetter("weights.version")
# In an entry, "kind" is that of the event or effect.
_KIND = attrgetter("kind")

EVENTS: dict[type[Any], Callable[[Any], Short]] = {
    ev.Submit: _form("submit", _SUBMIT, prompt_tokens=_size("prompt"), samples=attrgetter("num_samples")),
    ev.Resume: _form("resume", "frontend stream request_id"),
    ev.Restored: _form("restored", "request_id", request_id=attrgetter("submit.request_id")),
    ev.Cancel: _form("cancel", "frontend stream detach"),
    ev.Finish: _form("finish", "frontend stream output_tokens"),
    ev.Abort: _form("abort", "frontend requests", requests=_size("request_ids")),
    ev.FlushCache: _form("flush", "frontend"),
    ev.ClearQuarantine: _form("clear_quarantine", "frontend keys", keys=_size("keys")),
    ev.FrontendJoined: _form("frontend_joined", "frontend"),
    ev.FrontendLost: _form("frontend_lost", "frontend is_orderly"),
    ev.WorkerJoined: _form(
        "worker_joined", "worker pid pages rows device", **_SIZES, device=lambda one: one.info.device[:MAX_TEXT]
    ),
    ev.WorkerLost: _form("worker_lost", "worker reason is_orderly", reason=_text("reason")),
    ev.WorkerStops: _form("worker_stops", "worker"),
    ev.Paused: _form("paused", "seconds"),
    ev.Drain: _form("drain", "frontend worker force stop_replies"),
    ev.DrainStarted: _form("drain_started", ""),
    ev.DrainEnded: _form("drain_ended", ""),
    ev.TenantsChanged: _form("tenants", "count", count=_size("limits")),
    ev.UpdateWeights: _form(
        "update_weights", "frontend version running stop_replies", version=_VERSION, running=attrgetter("running.value")
    ),
    ev.WeightsLoaded: _form("weights_loaded", "worker version ok detail", detail=_text("detail")),
    ev.ResourceReady: _form(
        "resource_ready", "worker resource hash error", hash=_hash, resource=_KIND, error=_text("error")
    ),
    ev.WeightsRestored: _form("weights_restored", "version", version=_VERSION),
}
"""The short forms of events. Those of steps are in `Ring`; heartbeats, ticks and queries are not kept."""

EFFECTS: dict[type[Any], Callable[[Any], Short]] = {
    fx.WorkerAccepted: _form("accepted", "worker generation keeps_pages"),
    fx.WorkerProven: _form("proven", "worker was_standby"),
    fx.WorkerRefused: _form("refused", "worker reason retry", reason=_text("reason")),
    fx.AskRejoin: _form("ask_rejoin", "worker"),
    fx.KillWorker: _form("kill", "worker"),
    fx.LoadWeights: _form("load_weights", "worker version keep_rows", version=_VERSION),
    fx.PrepareResource: _form(
        "prepare_resource", "worker resource hash bytes", hash=_hash, resource=_KIND, bytes=_size("source")
    ),
    fx.DropResource: _form("drop_resource", "worker resource hash", hash=_hash, resource=_KIND),
    fx.Note: _form("note", "message", message=_text("message")),
    fx.News: _form("news", "message", message=_text("message")),
    fx.Resumed: _form("resumed", "frontend stream request_id"),
    fx.Replaced: _form("replaced", "frontend stream"),
}
"""The short forms of effects, except plans, rejections and ends (`Ring`)."""


def of_end(frontend: str, end: fx.End) -> tuple[Short, str | None]:
    """Returns the short form of a sample's end, and a sentence if the service is to blame.

    That is so if the request killed its workers, for example.
    """
    outcome, stats, cause = str(end.reason), end.stats, None
    if end.failure is not None:
        outcome = f"failed: {end.failure.code}"
        if end.failure.code is fx.FailureCode.INTERNAL:
            cause = f"a request of {frontend or 'no front end'} failed, stream {end.stream}"
    values = (outcome, stats.output_tokens, stats.preemptions, stats.worker_changes, stats.total_seconds)
    return ("end", frontend, end.stream, *values), cause


def cause_of(one: Any) -> str | None:
    """Returns a sentence if an event or effect is the death of a worker or a front end."""
    match one:
        case ev.WorkerLost(is_orderly=False):
            return f"worker {one.worker} was lost"
        case ev.FrontendLost(is_orderly=False):
            return f"front end {one.frontend} was lost"
        case fx.KillWorker():
            return f"worker {one.worker} hangs"
        case _:
            return None


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
            self._add(now, *of_end(output.frontend, end))
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
