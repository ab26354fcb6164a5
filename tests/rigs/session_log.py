"""Writes what a simulation passes to the core as an event log, in the messages that the core's peers would have sent.

Owns the translation from events back to messages. Each is parsed again and must give the same event: so the log has the
session that was run.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tandem.internal.v1 import record_pb2, worker_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.recording import event_log
from scheduler_svc.recording.event_log import EffectsDigest
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire import worker as worker_wire
from tandem_contract.codec import packed


class SessionLog:
    """The logs of one session, a file for each life of its core."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / name
        self._digests: list[EffectsDigest] = []
        self._recorder: event_log.Recorder | None = None

    def begin(self, config: CoreConfig) -> None:
        self.close()
        self._recorder = event_log.Recorder(self._path.with_name(f"{self._path.name}.{len(self._digests)}"), config)
        self._digests.append(EffectsDigest())

    def add(self, now: float, event: ev.Event, effects: list[fx.Effect], **entry: Any) -> None:
        """Adds an event that the core has handled. `entry` has its field in record.proto, if that is known."""
        entry = entry or entry_of(event)
        message = record_pb2.RecordedEvent(now=now, **entry)
        parsed = event_log.event_of(record_pb2.RecordedEvent.FromString(message.SerializeToString()))
        assert _value(parsed) == _value(event), f"the log would have {parsed} in place of {event}"
        assert self._recorder is not None, "no core has started"
        self._recorder.arrived(now, event, entry)
        self._recorder.handled(now, event, effects)
        self._digests[-1].add(effects)

    def close(self) -> None:
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


def _of_frontend(event: Any) -> tuple[str, Any]:
    return "frontend", frontend_wire.EVENTS.frame(event)


def _of_worker(event: Any) -> tuple[str, Any]:
    return "worker", worker_wire.EVENTS.frame(event)


def _lost(event: ev.WorkerLost) -> tuple[str, Any]:
    return _of_worker(event) if event.is_orderly else ("worker_lost", record_pb2.PeerLost(reason=event.reason))


def _result(event: ev.StepDone) -> tuple[str, Any]:
    status = worker_pb2.StepStatus.Value(f"STEP_STATUS_{event.status.name}")
    told = {
        name: worker_pb2.Logprobs(
            logprobs=packed(values.logprobs), top_k=values.top_k, top_token_ids=packed(values.top_token_ids),
            top_logprobs=packed(values.top_logprobs),
        )
        for name, values in (("logprobs", event.logprobs), ("prompt_logprobs", event.prompt_logprobs))
        if len(values.logprobs)
    }  # fmt: skip
    if (constraints := event.constraints) is not None:
        told |= {"constraint_complete": packed(constraints.complete), "constraint_failed": packed(constraints.failed)}
        told["constraint_detail"] = constraints.detail
    names = ("generation", "step", "detail", "compute_us", "pool_id", "damaged_pages")
    message = worker_pb2.StepResult(
        **{name: getattr(event, name) for name in names}, **told, status=status, tokens=packed(event.tokens),
        nonfinite=packed(event.nonfinite),
    )  # fmt: skip
    return "worker", worker_pb2.WorkerToCore(result=message).SerializeToString()


_MESSAGES: dict[type[Any], Callable[[Any], tuple[str, Any]]] = {
    **dict.fromkeys(frontend_wire.EVENTS.kinds, _of_frontend),
    **dict.fromkeys(worker_wire.EVENTS.kinds, _of_worker),
    ev.FrontendLost: lambda event: ("frontend_lost", record_pb2.PeerLost()),
    ev.WorkerLost: _lost,
    ev.StepDone: _result,
    ev.TenantsChanged: lambda event: ("tenants_changed", tenants_wire.entry_of(event)),
    ev.Tick: lambda event: ("tick", record_pb2.Tick()),
    ev.Paused: lambda event: ("paused", record_pb2.Paused(seconds=event.seconds)),
    ev.DrainStarted: lambda event: ("drain_started", record_pb2.DrainStarted()),
    ev.DrainEnded: lambda event: ("drain_ended", record_pb2.DrainEnded()),
}
