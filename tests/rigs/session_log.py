"""Writes what a simulation passes to the core as an event log, in the messages that the core's peers would have sent.

Owns the translation from events back to messages. Each is parsed again and must give the same event: so the log has the
session that was run.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tandem.internal.v1 import frontend_pb2, record_pb2, worker_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.names import own_id
from scheduler_svc.recording import event_log
from scheduler_svc.recording.event_log import EffectsDigest
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire.arrays import packed
from scheduler_svc.wire.resources import fill_resources, name_of
from scheduler_svc.wire.worker import fill_labels


class SessionLog:
    """The logs of one session, a file for each life of its core."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._digests: list[EffectsDigest] = []
        self._recorder: event_log.Recorder | None = None

    def begin(self, config: CoreConfig) -> None:
        """A core starts."""
        self.close()
        self._recorder = event_log.Recorder(self._path.with_name(f"{self._path.name}.{len(self._digests)}"), config)
        self._digests.append(EffectsDigest())

    def add(self, now: float, event: ev.Event, effects: list[fx.Effect], **entry: Any) -> None:
        """Adds an event that the core has handled. `entry` has its field in record.proto, if that is known."""
        message = record_pb2.RecordedEvent(now=now, **(entry or entry_of(event)))
        parsed = event_log.event_of(record_pb2.RecordedEvent.FromString(message.SerializeToString()))
        assert _value(parsed) == _value(event), f"the log would have {parsed} in place of {event}"
        assert self._recorder is not None, "no core has started"
        self._recorder.add_event(message)
        self._recorder.add_effects(effects)
        self._digests[-1].add(effects)

    def close(self) -> None:
        """The core ends."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def digest(self) -> str:
        """Returns one digest of the effects of all lives."""
        return sha256(b"".join(each.value().to_bytes(8, "little") for each in self._digests)).hexdigest()[:16]


def _value(event: Any) -> int:
    digest = EffectsDigest()
    digest.add([event])
    return digest.value()


def over_the_wire(event: Any) -> Any:
    """Returns the event as the core gets it from its peer."""
    return event_log.event_of(record_pb2.RecordedEvent(**entry_of(event)))


def entry_of(event: Any) -> dict[str, Any]:
    """Returns the fields of a RecordedEvent. Raises KeyError for an event that no session has."""
    kind, message = _MESSAGES[type(event)](event)
    peer = getattr(event, "frontend", None) or getattr(event, "worker", "")
    return {"peer": peer, kind: message}


def _same(event: Any, message: type[Any], **others: Any) -> Any:
    """The message with the fields that it has in common with the event, and others."""
    names = {field.name for field in fields(event)} & message.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return message(**{name: getattr(event, name) for name in names}, **others)


def _frontend(name: str, message: type[Any]) -> Callable[[Any], tuple[str, Any]]:
    return lambda event: ("frontend", frontend_pb2.FrontendToCore(**{name: _same(event, message)}))


def _submit(event: ev.Submit) -> tuple[str, Any]:
    message = _same(
        event, frontend_pb2.Submit, prompt=packed(event.prompt), stop_token_ids=_packed(event.stop_token_ids),
        request_id=own_id(event.request_id, event.tenant),
        bypass_read=not event.cache_read, bypass_write=not event.cache_write,
    )  # fmt: skip
    fill_resources(message, event.resources)
    return "frontend", frontend_pb2.FrontendToCore(submit=message)


def _packed(ids: Sequence[int]) -> bytes:
    return packed(np.array(ids, np.int32))


def _drain(event: ev.Drain) -> tuple[str, Any]:
    message = _same(event, frontend_pb2.Drain, request=_same(event, control_pb2.DrainRequest))
    return "frontend", frontend_pb2.FrontendToCore(drain=message)


def _update(event: ev.UpdateWeights) -> tuple[str, Any]:
    running = control_pb2.RunningRequests.Value(f"RUNNING_REQUESTS_{event.running.name}")
    request = _same(
        event, control_pb2.UpdateWeightsRequest, running=running, version=event.weights.version,
        folder=event.weights.folder,
    )  # fmt: skip
    message = _same(event, frontend_pb2.UpdateWeights, request=request)
    return "frontend", frontend_pb2.FrontendToCore(update_weights=message)


def _joined(event: ev.WorkerJoined) -> tuple[str, Any]:
    info = event.info
    defaults, protocol = _same(info.defaults, worker_pb2.GenerationDefaults), worker_pb2.PROTOCOL_CURRENT
    join = _same(info, worker_pb2.Join, protocol=protocol, standby=info.is_standby, defaults=defaults)
    if event.kept is not None:
        join.kept.page_root, join.kept.generation = bytes.fromhex(event.kept.page_root), event.kept.generation
        fill_labels(join.kept.labels, event.kept.labels)
    return "worker", worker_pb2.WorkerToCore(join=join)


def _lost(event: ev.WorkerLost) -> tuple[str, Any]:
    if event.is_orderly:
        return "worker", worker_pb2.WorkerToCore(leave=worker_pb2.Leave())
    return "worker_lost", record_pb2.PeerLost(reason=event.reason)


def _alive(event: ev.WorkerAlive) -> tuple[str, Any]:
    generation, step = event.done or (0, 0)
    beat = worker_pb2.Heartbeat(num_in_flight=event.num_in_flight, generation=generation, last_step=step)
    return "worker", worker_pb2.WorkerToCore(heartbeat=beat)


def _result(event: ev.StepDone) -> tuple[str, Any]:
    status = worker_pb2.StepStatus.Value(f"STEP_STATUS_{event.status.name}")
    told = {
        name: _same(
            values, worker_pb2.Logprobs, logprobs=packed(values.logprobs), top_token_ids=packed(values.top_token_ids),
            top_logprobs=packed(values.top_logprobs),
        )
        for name, values in (("logprobs", event.logprobs), ("prompt_logprobs", event.prompt_logprobs))
        if len(values.logprobs)
    }  # fmt: skip
    if (constraints := event.constraints) is not None:
        told |= {"constraint_complete": packed(constraints.complete), "constraint_failed": packed(constraints.failed)}
        told["constraint_detail"] = constraints.detail
    tokens, nonfinite = packed(event.tokens), packed(event.nonfinite)
    plain = {"tokens": tokens, "nonfinite": nonfinite, "status": status, "logprobs": None, "prompt_logprobs": None}
    message = _same(event, worker_pb2.StepResult, **plain | told)
    return "worker", worker_pb2.WorkerToCore(result=message)


_MESSAGES: dict[type[Any], Callable[[Any], tuple[str, Any]]] = {
    ev.FrontendJoined: _frontend("hello", frontend_pb2.Hello),
    ev.FrontendLost: lambda event: ("frontend_lost", record_pb2.PeerLost()),
    ev.Submit: _submit,
    ev.Cancel: _frontend("cancel", frontend_pb2.Cancel),
    ev.Finish: _frontend("finish", frontend_pb2.Finish),
    ev.Resume: _frontend("resume", frontend_pb2.Resume),
    ev.Abort: _frontend("abort", frontend_pb2.Abort),
    ev.LoadQuery: _frontend("load_query", frontend_pb2.LoadQuery),
    ev.FlushCache: _frontend("flush_cache", frontend_pb2.FlushCache),
    ev.Drain: _drain,
    ev.UpdateWeights: _update,
    ev.WorkerJoined: _joined,
    ev.WorkerLost: _lost,
    ev.WorkerStops: lambda event: ("worker", worker_pb2.WorkerToCore(stops=worker_pb2.Stops())),
    ev.WorkerAlive: _alive,
    ev.StepDone: _result,
    ev.ResourceReady: lambda event: ("worker", worker_pb2.WorkerToCore(
        constraint_ready=_same(event, worker_pb2.ConstraintReady, kind=name_of(event.kind)))),
    ev.WeightsLoaded: lambda event: ("worker", worker_pb2.WorkerToCore(
        weights_loaded=_same(event, worker_pb2.WeightsLoaded))),
    ev.TenantsChanged: lambda event: ("tenants_changed", tenants_wire.entry_of(event)),
    ev.Tick: lambda event: ("tick", record_pb2.Tick()),
    ev.Paused: lambda event: ("paused", record_pb2.Paused(seconds=event.seconds)),
    ev.DrainStarted: lambda event: ("drain_started", record_pb2.DrainStarted()),
    ev.DrainEnded: lambda event: ("drain_ended", record_pb2.DrainEnded()),
}  # fmt: skip
