"""The core's event log: what came in and when, written by --record and read by the replay.

Owns the file. An event is written before it is handled, so the one that breaks the core is in the log; it carries a
digest of all effects before it, so a replay proves that the same events give the same effects. A log that was closed in
order ends with an entry that has only the digest. Events travel as the protobuf messages that they came from.
"""

import hashlib
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import record_pb2 as pb

from scheduler_svc import private_file
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import Admission, CoreConfig, Policy
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.arrays import WireError, parsed

log = logging.getLogger("tandem.core")

_VERSION = 4
_LENGTH = struct.Struct("<I")
_MAX_ENTRY = 1 << 28


class EffectsDigest:
    """SHA-256 over every effect since the start, in order, field by field."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, effects: list[fx.Effect]) -> None:
        """Takes in the effects of one event."""
        for effect in effects:
            self._feed(effect)

    def value(self) -> int:
        """The first 8 bytes, as a number."""
        return int.from_bytes(self._hash.copy().digest()[:8], "little")

    def _feed(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            values = cast("npt.NDArray[Any]", value)
            self._hash.update(f"{values.dtype.str}{values.shape}".encode())
            self._hash.update(values.tobytes())
        elif is_dataclass(value):
            self._hash.update(type(value).__name__.encode())
            for field in fields(value):
                self._feed(getattr(value, field.name))
        elif isinstance(value, tuple):
            self._hash.update(b"(")
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                self._feed(item)
            self._hash.update(b")")
        else:
            self._hash.update(repr(value).encode() + b";")


class Recorder:
    """Writes a fresh file; a disk that takes no more ends the recording, not the service."""

    def __init__(self, path: Path, config: CoreConfig) -> None:
        """Raises OSError, FileExistsError where the file exists."""
        self._file = private_file.create(path)
        self._is_broken = False
        self._digest = EffectsDigest()
        header = pb.RecordedHeader(
            version=_VERSION,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            plans_in_flight=config.plans_in_flight,
            step_timeout_seconds=config.step_timeout_seconds,
            silence_timeout_seconds=config.silence_timeout_seconds,
            max_worker_wait_seconds=config.max_worker_wait_seconds,
            max_plan_bytes=config.max_plan_bytes,
            prove_workers=config.prove_workers,
            report_steps=config.report_steps,
            mixed_steps=config.policy.mixed_steps,
            admission=config.policy.admission,
            cache_aware=config.policy.cache_aware,
            fair_share=config.policy.fair_share,
        )
        self._write(header.SerializeToString())

    def add_event(self, entry: pb.RecordedEvent) -> None:
        """An event that is about to be handled: `now`, `peer` and the event set."""
        entry.effects_digest = self._digest.value()
        self._write(entry.SerializeToString())

    def add_effects(self, effects: list[fx.Effect]) -> None:
        """What came of the event written last."""
        self._digest.add(effects)

    def flush(self) -> None:
        """Hands what was written to the system, so that it outlives this process."""
        self._guard(self._file.flush)

    def close(self) -> None:
        """Ends the log with the last digest."""
        self._write(pb.RecordedEvent(effects_digest=self._digest.value()).SerializeToString())
        self._guard(self._file.close)

    def _write(self, data: bytes) -> None:
        if not self._is_broken:
            self._guard(lambda: self._file.write(_LENGTH.pack(len(data)) + data))

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._is_broken:
                log.error("recording ends here, %s cannot be written: %s", self._file.name, error.strerror)
            self._is_broken = True


def read(path: Path) -> tuple[CoreConfig, Iterator[pb.RecordedEvent]]:
    """The core's settings and the entries of a log. A last entry cut short by a crash is left out."""
    entries = _entries(path)
    header = parsed(pb.RecordedHeader, next(entries, b""))
    if header.version != _VERSION:
        raise WireError(f"{path} has version {header.version}; this program reads {_VERSION}")
    if header.admission not in list(Admission):
        raise WireError(f"{path} has admission {header.admission!r}; this program knows {', '.join(Admission)}")
    config = CoreConfig(
        max_waiting=header.max_waiting,
        max_waiting_tokens=header.max_waiting_tokens,
        plans_in_flight=header.plans_in_flight,
        step_timeout_seconds=header.step_timeout_seconds,
        silence_timeout_seconds=header.silence_timeout_seconds,
        max_worker_wait_seconds=header.max_worker_wait_seconds,
        max_plan_bytes=header.max_plan_bytes,
        prove_workers=header.prove_workers,
        report_steps=header.report_steps,
        policy=Policy(
            mixed_steps=header.mixed_steps,
            admission=Admission(header.admission),
            cache_aware=header.cache_aware,
            fair_share=header.fair_share,
        ),
    )
    return config, (parsed(pb.RecordedEvent, data) for data in entries)


def _entries(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            if length > _MAX_ENTRY:
                raise WireError(f"{path} has an entry of {length} bytes; the limit is {_MAX_ENTRY}")
            data = file.read(length)
            if len(data) < length:
                return
            yield data


def event_of(entry: pb.RecordedEvent) -> ev.Event:
    """What an entry meant to the core. Raises WireError."""
    match entry.WhichOneof("event"):
        case "frontend":
            return frontend_wire.event_of(entry.frontend, entry.peer)
        case "worker":
            return worker_wire.event_of(entry.worker, entry.peer)
        case "frontend_lost":
            return ev.FrontendLost(frontend=entry.peer)
        case "worker_lost":
            return ev.WorkerLost(worker=entry.peer, reason=entry.worker_lost.reason)
        case "tick":
            return ev.Tick()
        case "drain_started":
            return ev.DrainStarted()
        case "drain_ended":
            return ev.DrainEnded()
        case _:
            raise WireError("an entry without an event")
