"""What the flight recorder keeps of each event and effect of the core: a kind and a few values.

Owns the list. A short form has names, numbers and reasons. It refers to no array and no message, so its size is bounded
by that of ids and of texts that are cut.
"""

from collections.abc import Callable
from typing import Any

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.effects import Resumed

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
