"""The digest of effects: what a replay compares, and what stays equal where no decision of the core has changed.

Owns the tags that stand for the classes of effects, so that classes, enums and modules may be renamed and moved. A
field that comes, goes or changes its place, and another value or order of effects, give another digest. Digests of
different versions of the record are not comparable.
"""

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.effects import Detached, Forgotten, Replaced, Resumed
from scheduler_svc.core.messages.operators import QuarantineReply
from scheduler_svc.core.messages.reports import DrainReport, StepReport, WeightsReport

VERSION = 6
"""Of the record. Versions differ in their digests."""

TAGS: dict[type[Any], bytes] = {
    fx.Admitted: b"admitted",
    fx.Rejected: b"rejected",
    fx.StepOutput: b"output",
    fx.Waits: b"waits",
    fx.AbortReply: b"abort",
    fx.LoadReply: b"load",
    fx.FlushReply: b"flush",
    QuarantineReply: b"quarantine",
    fx.ModelServed: b"model",
    fx.CoreStatus: b"status",
    fx.WorkerAccepted: b"accepted",
    fx.WorkerProven: b"proven",
    fx.WorkerRefused: b"refused",
    fx.AskRejoin: b"rejoin",
    fx.DismissWorker: b"dismiss",
    fx.KillWorker: b"kill",
    fx.SendPlan: b"plan",
    fx.PrepareConstraint: b"prepare",
    fx.DropConstraint: b"drop",
    fx.LoadWeights: b"load weights",
    fx.WeightsChanged: b"weights",
    WeightsReport: b"update",
    fx.UpdateRefused: b"update refused",
    fx.AnnounceDrain: b"announce",
    DrainReport: b"drain",
    fx.DrainRefused: b"drain refused",
    fx.Note: b"note",
    StepReport: b"step",
    Resumed: b"resumed",
    Replaced: b"replaced",
    Detached: b"detached",
    Forgotten: b"forgotten",
}
"""One tag per class of effect, which never changes. What is within an effect needs none: its place says what it is."""


class EffectsDigest:
    """SHA-256 over every effect since the start, in order, field by field."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, effects: list[fx.Effect]) -> None:
        """Adds the effects of one event."""
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
            for field in fields(value):
                self._feed(getattr(value, field.name))
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


NAMES_OF_VERSION_5: dict[type[Any], str] = {}
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
