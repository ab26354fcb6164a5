"""The core's event log: every event and its time, written by --record and read by the replay.

Owns the file. An event is written before the core handles it, so the log contains the event that breaks the core. Each
entry carries a digest of all effects before it, so a replay proves that the same events give the same effects. A log
that was closed in order ends with an entry that has only the digest. The frames of peers are stored as they came. The
header has the core's settings as JSON, all of them: their fields are read from `CoreConfig`, its nested policy
included, so a new setting needs no change here.

Owns also the tags that stand for the classes of effects in a digest, so that classes, enums and modules may be renamed
and moved. A field that comes (except those in `LATER`), goes or changes its place, and another value or order of
effects, give another digest. Digests of different versions of the record are not comparable.
"""

import hashlib
import json
import logging
import mmap
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from tandem.internal.v1 import record_pb2 as pb
from tandem.internal.v1.frontend_pb2 import FrontendToCore
from tandem.internal.v1.worker_pb2 import WorkerToCore

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.plan import RowStart
from scheduler_svc.journal.reader import event_of as restored_event
from scheduler_svc.journal.reader import quarantine_event
from scheduler_svc.observer import Observer
from scheduler_svc.wire import frontend as frontend_wire
from scheduler_svc.wire import tenants as tenants_wire
from scheduler_svc.wire import worker as worker_wire
from scheduler_svc.wire.framing import MAX_PAYLOAD, ForeignFileError, Format, Frames, Tail, frame
from tandem_contract.bounds import WireError
from tandem_contract.codec import Codec, parsed
from tandem_contract.writing import RecordFile

VERSION = 6
"""The version of the record. Versions differ in their digests."""
FORMAT = Format("record", VERSION)
_OLD_LENGTH = struct.Struct("<I")

TAGS: dict[type[Any], bytes] = {
    fx.Admitted: b"admitted",
    fx.Rejected: b"rejected",
    fx.StepOutput: b"output",
    fx.Waits: b"waits",
    fx.AbortReply: b"abort",
    fx.LoadReply: b"load",
    fx.FlushReply: b"flush",
    fx.QuarantineReply: b"quarantine",
    fx.RequestsReply: b"requests",
    fx.ModelServed: b"model",
    fx.CoreStatus: b"status",
    fx.WorkerAccepted: b"accepted",
    fx.WorkerProven: b"proven",
    fx.WorkerRefused: b"refused",
    fx.AskRejoin: b"rejoin",
    fx.DismissWorker: b"dismiss",
    fx.KillWorker: b"kill",
    fx.SendPlan: b"plan",
    fx.PrepareResource: b"prepare",
    fx.DropResource: b"drop",
    fx.LoadWeights: b"load weights",
    fx.WeightsChanged: b"weights",
    fx.WeightsReport: b"update",
    fx.UpdateRefused: b"update refused",
    fx.AnnounceDrain: b"announce",
    fx.DrainReport: b"drain",
    fx.DrainRefused: b"drain refused",
    fx.Note: b"note",
    fx.News: b"news",
    fx.StepReport: b"step",
    fx.Resumed: b"resumed",
    fx.Replaced: b"replaced",
    fx.Detached: b"detached",
    fx.Forgotten: b"forgotten",
}
"""One tag per class of effect, which never changes. What is within an effect needs none: its place says what it is."""


LATER: dict[type[Any], frozenset[str]] = {
    fx.PrepareResource: frozenset({"kind"}),
    fx.DropResource: frozenset({"kind"}),
    RowStart: frozenset({"other_needs"}),
    fx.CoreStatus: frozenset({"places"}),
}
"""Fields that came after version 6 began. Digests contain them only where they do not have their defaults."""


class EffectsDigest:
    """SHA-256 over every effect since the start, in order, field by field."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, effects: Iterable[fx.Effect]) -> None:
        for effect in effects:
            self._feed(effect)

    def value(self) -> int:
        """Returns the first 8 bytes as a number."""
        return int.from_bytes(self._hash.copy().digest()[:8], "little")

    def _feed(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            values = cast("npt.NDArray[Any]", value)
            self._hash.update(f"{values.dtype.str}{values.shape}".encode())
            self._hash.update(values.tobytes())
        elif is_dataclass(value):
            self._hash.update(self._before(value))
            later = LATER.get(type(value), ())
            for field in fields(value):
                one = getattr(value, field.name)
                if field.name not in later or one != field.default:
                    self._feed(one)
            self._hash.update(self._after)
        elif isinstance(value, tuple):
            self._hash.update(b"(")
            for item in value:  # pyright: ignore[reportUnknownVariableType]
                self._feed(item)
            self._hash.update(b")")
        else:
            self._hash.update(self._plain(value).encode() + b";")

    _after = b"}"

    def _before(self, value: object) -> bytes:
        return TAGS.get(type(value), b"") + b"{"

    def _plain(self, value: object) -> str:
        if isinstance(value, np.generic):
            return repr(cast("Any", value).item())
        return repr(value.value if isinstance(value, Enum) else value)


NAMES_OF_VERSION_5: dict[type[Any], str] = {
    fx.News: "Note",
    fx.PrepareResource: "PrepareConstraint",
    fx.DropResource: "DropConstraint",
}
"""What classes and enums that were renamed since were called in version 5."""


class DigestOfVersion5(EffectsDigest):
    """Contains the name of every class and enum. Comparable while effects have the fields of version 5."""

    _after = b""

    def _before(self, value: object) -> bytes:
        return _name(value).encode()

    def _plain(self, value: object) -> str:
        return f"<{_name(value)}.{value.name}: {value.value!r}>" if isinstance(value, Enum) else repr(value)


def _name(value: object) -> str:
    return NAMES_OF_VERSION_5.get(type(value), type(value).__name__)


log = logging.getLogger("tandem.core")

_WEIGHTS_RESTORED = Codec(pb.WeightsRestored, ev.WeightsRestored)
# The most bytes of a turn before they are written.
_MAX_HELD_BYTES = 1 << 16
_WITHOUT_FIELDS = {"tick": ev.Tick(), "drain_started": ev.DrainStarted(), "drain_ended": ev.DrainEnded()}


class Recorder(Observer):
    """Writes a new file. If it cannot be written any more, the recording ends and the service continues.

    It does not go on later: a replay needs every event.
    """

    def __init__(self, path: Path, config: CoreConfig) -> None:
        """Raises FileExistsError if the file exists, OSError if it cannot be created."""
        consequence = "the recording ends with the entry before, and the service continues"
        self._file = RecordFile(path, log=log, what="the event log", consequence=consequence)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._digest = EffectsDigest()
        header = pb.RecordedHeader(version=VERSION, core_config=encode_config(config))
        self._held.append(FORMAT.first_line)
        self._write(header.SerializeToString())

    def arrived(self, now: float, event: ev.Event, entry: Mapping[str, Any]) -> None:
        message = pb.RecordedEvent(now=now, effects_digest=self._digest.value(), **entry)
        self._write(message.SerializeToString())

    def handled(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """Adds the effects of the event written last to the digest."""
        self._digest.add(effects)

    def sending(self, now: float) -> None:
        """Passes all entries to the operating system, so that they outlive this process."""
        self.flush()

    def flush(self) -> None:
        """Passes all entries to the operating system."""
        entries, self._held, self._held_bytes = self._held, [], 0
        if entries and not self._file.trouble.cause:
            self._file.append(b"".join(entries), len(entries))

    def close(self) -> None:
        """Writes the last digest and closes the file."""
        self._write(pb.RecordedEvent(effects_digest=self._digest.value()).SerializeToString())
        self.flush()
        self._file.close()

    def _write(self, data: bytes) -> None:
        if self._file.trouble.cause:
            return
        try:
            self._held.append(frame(data))
        except OSError as error:
            self.flush()
            self._file.trouble.failed(error)
            return
        self._held_bytes += len(data)
        if self._held_bytes > _MAX_HELD_BYTES:
            self.flush()


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
    return EventLog(decode_config(header.core_config), digests[header.version](), events)


def _entries(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        start = file.read(64)
        file.seek(0)
        if not start.startswith(b"tandem "):
            yield from _old_entries(file)
            return
        try:
            FORMAT.begins(start)
        except ForeignFileError as error:
            raise WireError(f"it {error}") from None
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            yield from (frames := Frames(data, FORMAT))
            if frames.extent.tail is Tail.DAMAGED:
                raise WireError(f"the entry at byte {frames.extent.end:,} does not fit its checksum")


def _old_entries(file: BinaryIO) -> Iterator[bytes]:
    """Yields the entries of a file without a first line."""
    while len(prefix := file.read(_OLD_LENGTH.size)) == _OLD_LENGTH.size:
        (length,) = _OLD_LENGTH.unpack(prefix)
        if length > MAX_PAYLOAD:
            raise WireError(f"an entry has {length:,} bytes; the limit is {MAX_PAYLOAD:,}")
        data = file.read(length)
        if len(data) < length:
            return
        yield data


def event_of(entry: pb.RecordedEvent) -> ev.Event:
    """Returns the core's event for an entry. Raises WireError if the entry has none."""
    match entry.WhichOneof("event"):
        case "frontend":
            return frontend_wire.event_of(parsed(FrontendToCore, entry.frontend), entry.peer)
        case "worker":
            return worker_wire.event_of(parsed(WorkerToCore, entry.worker), entry.peer)
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
            return _WEIGHTS_RESTORED.decode(entry.weights_restored)
        case "tick" | "drain_started" | "drain_ended" as kind:
            return _WITHOUT_FIELDS[kind]
        case _:
            raise WireError("an entry has no event")


_CONFIG = TypeAdapter(CoreConfig)


def encode_config(config: CoreConfig) -> str:
    """Returns one JSON object with every field."""
    return json.dumps(asdict(config))


def decode_config(text: str) -> CoreConfig:
    """Raises WireError if a setting is unknown, missing or has a value that this program does not know."""
    try:
        config = _CONFIG.validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{name}: " for name in problem["loc"])
        raise WireError(f"the core's settings: {where}{problem['msg']}") from None
    given, expected = _names(json.loads(text)), _names(asdict(config))
    for problem, names in (("unknown", given - expected), ("missing", expected - given)):
        if names:
            listed = ", ".join(sorted(names))
            raise WireError(f"the core's settings: {listed} {problem}; another version wrote this record")
    return config


def _names(settings: dict[str, Any]) -> set[str]:
    """Returns the names of the settings, those of the policy included."""
    return settings.keys() | settings.get("policy", {}).keys()
