"""The core's event log: every event and its time, written by --record and read by the replay.

Owns the file. An event is written before the core handles it, so the log contains the event that breaks the core. Each
entry carries a digest of all effects before it, so a replay proves that the same events give the same effects. A log
that was closed in order ends with an entry that has only the digest. Events are stored as the protobuf messages that
they came from.
"""

import errno
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tandem.internal.v1 import record_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.journal.reader import event_of as restored_event
from scheduler_svc.journal.reader import quarantine_event
from scheduler_svc.recording import core_config
from scheduler_svc.recording.digest import VERSION, DigestOfVersion5, EffectsDigest
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.arrays import WireError, parsed
from scheduler_svc.wire.worker import restored_of
from tandem_contract import private_file

log = logging.getLogger("tandem.core")

_LENGTH = struct.Struct("<I")
_MAX_ENTRY = 1 << 28
_WITHOUT_FIELDS = {"tick": ev.Tick(), "drain_started": ev.DrainStarted(), "drain_ended": ev.DrainEnded()}


class Recorder:
    """Writes a new file. If it cannot be written any more, the recording ends and the service continues."""

    def __init__(self, path: Path, config: CoreConfig) -> None:
        """Raises FileExistsError if the file exists, OSError if it cannot be created."""
        self._file = private_file.create(path)
        self._is_broken = False
        self._digest = EffectsDigest()
        header = pb.RecordedHeader(version=VERSION, core_config=core_config.encode(config))
        self._write(header.SerializeToString())

    def add_event(self, entry: pb.RecordedEvent) -> None:
        """Writes an event that the core is about to handle; `now`, `peer` and the event are set."""
        entry.effects_digest = self._digest.value()
        self._write(entry.SerializeToString())

    def add_effects(self, effects: list[fx.Effect]) -> None:
        """Adds the effects of the event written last to the digest."""
        self._digest.add(effects)

    def flush(self) -> None:
        """Passes all entries to the operating system, so that they outlive this process."""
        self._guard(self._file.flush)

    def close(self) -> None:
        """Writes the last digest and closes the file."""
        self._write(pb.RecordedEvent(effects_digest=self._digest.value()).SerializeToString())
        self._guard(self._file.close)

    def _write(self, data: bytes) -> None:
        if not self._is_broken:
            self._guard(lambda: self._file.write(_prefix(len(data)) + data))

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if not self._is_broken:
                log.error("recording stopped: %s cannot be written: %s", self._file.name, error.strerror)
            self._is_broken = True


def _prefix(length: int) -> bytes:
    """What comes before an entry. Raises OSError if the entry is longer than `read` takes."""
    if length > _MAX_ENTRY:
        raise OSError(errno.EFBIG, f"an entry has {length:,} bytes; the limit is {_MAX_ENTRY:,}")
    return _LENGTH.pack(length)


class EventLog(NamedTuple):
    """A log that is read: the core's settings, the empty digest of its version, and its entries."""

    config: CoreConfig
    digest: EffectsDigest
    entries: Iterator[pb.RecordedEvent]


def read(path: Path) -> EventLog:
    """Returns a log without a last entry that a crash cut short.

    Raises OSError if the file cannot be read, WireError if it is not a log of version 5 or 6.
    """
    entries = _entries(path)
    header = parsed(pb.RecordedHeader, next(entries, b""))
    digests = {5: DigestOfVersion5, VERSION: EffectsDigest}
    if header.version not in digests:
        raise WireError(f"it has version {header.version}; this program reads versions 5 and {VERSION}")
    events = (parsed(pb.RecordedEvent, data) for data in entries)
    return EventLog(core_config.decode(header.core_config), digests[header.version](), events)


def _entries(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(prefix := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(prefix)
            if length > _MAX_ENTRY:
                raise WireError(f"an entry has {length:,} bytes; the limit is {_MAX_ENTRY:,}")
            data = file.read(length)
            if len(data) < length:
                return
            yield data


def event_of(entry: pb.RecordedEvent) -> ev.Event:
    """Returns the core's event for an entry. Raises WireError if the entry has none."""
    match entry.WhichOneof("event"):
        case "frontend":
            return frontend_wire.event_of(entry.frontend, entry.peer)
        case "worker":
            return worker_wire.event_of(entry.worker, entry.peer)
        case "frontend_lost":
            return ev.FrontendLost(frontend=entry.peer)
        case "worker_lost":
            return ev.WorkerLost(worker=entry.peer, reason=entry.worker_lost.reason)
        case "paused":
            return ev.Paused(seconds=entry.paused.seconds)
        case "restored":
            return restored_event(entry.restored)
        case "quarantine_restored":
            return quarantine_event(entry.quarantine_restored)
        case "tenants_changed":
            return tenants_wire.event_of(entry.tenants_changed)
        case "weights_restored":
            return restored_of(entry.weights_restored)
        case "tick" | "drain_started" | "drain_ended" as kind:
            return _WITHOUT_FIELDS[kind]
        case _:
            raise WireError("an entry has no event")
