"""Reads the journal that an earlier scheduler left, and makes the core's events of it.

Owns the rules for damaged, foreign and old files:

- The last frame is incomplete (the process was killed while it wrote): it is dropped, because nothing of it was sent.
- A frame does not fit its checksum: no request of the file is restored, because one may miss tokens that its caller has
  seen. The file is kept as `journal.damaged`. What belongs to no request is taken from the frames before.
- The file is none of ours, or of another version: the service does not start.
- The file is gone or empty, although there was one with requests: the log says so.

The journal's clock is Unix time that follows no later jump of the system's clock: nobody's request ends early because
the system's time was corrected by hours. Only a restart of the machine, over which no other clock goes on, takes the
system's time again.
"""

import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import journal_pb2, record_pb2

from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import Int32Array
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.messages.operators import QuarantineRestored
from scheduler_svc.core.state.request import OutputWeights
from scheduler_svc.journal import records
from scheduler_svc.journal.file import FORMAT, JournalFolder
from scheduler_svc.journal.records import SampleEnd, SavedRequest, SavedSample
from scheduler_svc.wire.framing import ForeignFileError, Frames, Tail
from tandem_contract.bounds import WireError
from tandem_contract.codec import Codec, array, parsed
from tandem_contract.plural import numbered
from tandem_contract.settings import SettingError

log = logging.getLogger("tandem.core")

# A sample's offsets and tokens, and the indices of their records.
_Later: TypeAlias = tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]
# If this many schedulers in a row crashed with the same journal, it is taken for the cause.
_MAX_CRASHES = 2


@dataclass(slots=True, kw_only=True)
class SavedCore:
    """What the journal holds; all fields are empty if there was none."""

    state: journal_pb2.JournalState = field(default_factory=journal_pb2.JournalState)
    next_number: int = 1
    requests: list[SavedRequest] = field(default_factory=list[SavedRequest])
    """Live and lingering requests, in the order of arrival."""
    suspects: frozenset[int] = frozenset()
    """Numbers of the samples that may have killed a worker."""
    quarantine: journal_pb2.JournalQuarantine = field(default_factory=journal_pb2.JournalQuarantine)
    written_at: float = 0.0
    """Time of the last write by the system's clock: about when the earlier scheduler died."""


def read(folder: JournalFolder) -> SavedCore:
    """Reads the folder's journal. Raises SettingError if it cannot be read or is not a journal of this version."""
    try:
        descriptor = os.open(folder.current, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return _nothing(folder, "is not there")
    except OSError as error:
        raise SettingError(f"journal: {folder.current} cannot be read: {error.strerror}") from None
    try:
        return _read(folder, descriptor)
    except OSError as error:
        raise SettingError(f"journal: {folder.current} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _read(folder: JournalFolder, descriptor: int) -> SavedCore:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SettingError(
            f"journal: {folder.current} must be a file of user {os.getuid()} with mode 0600; it belongs to user "
            f"{status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}"
        )
    if not status.st_size:
        return _nothing(folder, "is empty")
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as data:
        try:
            is_whole = FORMAT.begins(data)
        except ForeignFileError as error:
            raise SettingError(
                f"journal: {folder.current} {error}; remove it or choose another folder with --journal"
            ) from None
        if not is_whole:
            return _nothing(folder, "ends within its first line")
        return _restored(folder, data, status.st_mtime)


def _nothing(folder: JournalFolder, what: str) -> SavedCore:
    """The content of a journal that is not there. An earlier scheduler may have left one with requests."""
    if folder.has_requests:
        log.error(
            "the journal %s %s, and the last scheduler left one with requests: it was removed or emptied since then; "
            "its requests are lost, and their callers cannot resume them",
            *(folder.current, what),
        )
        folder.mark_requests(False)
    return SavedCore()


def _restored(folder: JournalFolder, data: mmap.mmap, written_at: float) -> SavedCore:
    frames, collected = Frames(data, FORMAT), _Collected()
    requests, why = list[SavedRequest](), ""
    try:
        for payload in frames:
            collected.add(parsed(journal_pb2.JournalRecord, payload))
        requests = collected.whole()
    except WireError as error:
        why = f"a record cannot be read: {error}"
    extent = frames.extent
    if folder.num_crashes >= _MAX_CRASHES and collected.requests:
        why = f"{numbered(folder.num_crashes, 'scheduler')} in a row crashed with it"
        folder.forget_crashes()
    if extent.tail is Tail.DAMAGED:
        why = f"the frame at byte {extent.end:,} of {len(data):,} does not match its checksum"
    if why:
        os.replace(folder.current, folder.damaged)
        folder.mark_requests(False)
        log.error(
            "the journal %s is damaged: %s; its %s not restored; it is kept as %s for you to look at and remove",
            *(folder.current, why, numbered(len(collected.requests), "request", "are"), folder.damaged.name),
        )
        requests = []
    elif extent.tail is Tail.TORN:
        log.warning(
            "an incomplete record of %s at the end of the journal %s is dropped; nothing of it had been sent",
            *(numbered(len(data) - extent.end, "byte"), folder.current),
        )
    return replace(collected.saved, requests=requests, written_at=written_at)


class _Collected:
    """The content of the frames so far."""

    def __init__(self) -> None:
        self.saved = SavedCore()
        """What belongs to no request."""
        self.requests: dict[int, SavedRequest] = {}
        """Those that are not forgotten, without the tokens and ends that came later."""
        self._ends: dict[int, SampleEnd] = {}
        # Numbers, offsets and tokens of each record of tokens, and the version of the weights that computed them.
        self._tokens: list[tuple[npt.NDArray[np.uint64], Int32Array, Int32Array]] = []
        self._versions: list[str] = []

    def add(self, record: journal_pb2.JournalRecord) -> None:
        """Takes the next record. Raises WireError if it does not follow from those before."""
        match record.WhichOneof("record"):
            case "state":
                self.saved.state = record.state
            case "request":
                request = records.REQUEST.decode(record.request)
                self.requests[request.number] = request
                self.saved.next_number = max(self.saved.next_number, request.numbers.stop)
            case "tokens":
                numbers = array(record.tokens.numbers, np.uint64, "numbers")
                offsets = array(record.tokens.offsets, np.int32, "offsets")
                tokens = array(record.tokens.tokens, np.int32, "tokens")
                if not len(numbers) == len(offsets) == len(tokens):
                    raise WireError("numbers, offsets and tokens differ in length")
                self._tokens.append((numbers, offsets, tokens))
                self._versions.append(record.tokens.weights_version)
            case "end":
                self._ends[record.end.number] = records.SAMPLE_END.decode(record.end)
            case "forgotten":
                self.requests.pop(record.forgotten.number, None)
            case "suspects":
                self.saved.suspects = frozenset(array(record.suspects.numbers, np.uint64, "numbers").tolist())
            case "quarantine":
                self.saved.quarantine = record.quarantine
            case None:
                raise WireError("it is empty")

    def whole(self) -> list[SavedRequest]:
        """Returns the requests with all of their tokens and ends. Raises WireError if one misses tokens."""
        requests: list[SavedRequest] = []
        outputs = self._outputs()
        for request in sorted(self.requests.values(), key=lambda request: request.number):
            samples = zip(request.numbers, request.samples, strict=True)
            whole = [self._whole(number, sample, outputs.get(number)) for number, sample in samples]
            requests.append(replace(request, samples=tuple(whole)))
        return requests

    def _whole(self, number: int, first: SavedSample, later: _Later | None) -> SavedSample:
        end = first.end or self._ends.get(number)
        weights = _whole_weights(first.weights, later, self._versions)
        return SavedSample(tokens=_whole_output(first.tokens, later, end), end=end, weights=weights)

    def _outputs(self) -> dict[int, _Later]:
        """Returns the tokens of each sample from all records of tokens."""
        if not self._tokens:
            return {}
        parts_of_numbers, parts_of_offsets, parts_of_tokens = zip(*self._tokens, strict=True)
        numbers, offsets, tokens = map(np.concatenate, (parts_of_numbers, parts_of_offsets, parts_of_tokens))
        versions = np.repeat(np.arange(len(self._tokens)), list(map(len, parts_of_numbers)))
        order = numbers.argsort(kind="stable")
        ids, first = np.unique(numbers[order], return_index=True)
        bounds = [*first.tolist(), len(order)]
        parts = {number: order[bounds[i] : bounds[i + 1]] for i, number in enumerate(ids.tolist())}
        return {number: (offsets[part], tokens[part], versions[part]) for number, part in parts.items()}


def _whole_weights(
    first: Sequence[WeightsSpan], later: _Later | None, versions: Sequence[str]
) -> tuple[WeightsSpan, ...]:
    """Returns the spans of a sample's output: the `first` ones, then those of the `later` tokens."""
    if later is None or not (first or any(versions)):
        return tuple(first)
    weights = OutputWeights()
    weights.restore(first)
    offsets, _, indices = later
    for i in range(len(offsets)):
        weights.begin(versions[int(indices[i])], int(offsets[i]))
    return tuple(weights.spans)


def _whole_output(first: Int32Array, later: _Later | None, end: SampleEnd | None) -> Int32Array:
    """Returns a sample's output: its first tokens, then the `later` ones, with their offsets."""
    whole = first
    if later is not None:
        offsets, tokens, _ = later
        if not np.array_equal(offsets, np.arange(len(first), len(first) + len(offsets))):
            raise WireError(f"a sample's tokens do not follow its first {len(first)} without a gap")
        whole = np.concatenate([first, tokens])
    # A stop string may end the output before the last token.
    return whole if end is None else whole[: end.end.stats.output_tokens]


def wanted(saved: SavedCore, unix_now: float) -> Iterator[tuple[SavedRequest, record_pb2.RestoredRequest]]:
    """Yields the requests whose linger is not over, in order, each with its entry for the event log.

    The earlier scheduler may have died long ago. A live request has had no reader since then, and an ended one lingers
    from its end.
    """
    for request in saved.requests:
        ends = [sample.end.at for sample in request.samples if sample.end is not None]
        since = max(ends) if len(ends) == len(request.samples) else saved.written_at
        # A clock that was set back makes nothing linger longer.
        left = request.submit.linger_seconds - max(0.0, unix_now - since)
        if left > 0:
            entry = record_pb2.RestoredRequest(
                request=records.REQUEST.to_message(request),
                linger_seconds=left,
                identity=saved.state.identity,
                suspects=[i for i, number in enumerate(request.numbers) if number in saved.suspects],
                age_seconds=max(0.0, unix_now - request.accepted_at),
            )
            yield request, entry


_RESTORED = Codec(
    record_pb2.RestoredRequest, ev.Restored, given=("submit", "outputs", "ends", "weights"), other=("request",)
)


def event_of(entry: record_pb2.RestoredRequest) -> ev.Restored:
    """Returns the core's event. Raises WireError if the entry is malformed."""
    request = records.REQUEST.decode(entry.request)
    outputs = tuple(sample.tokens for sample in request.samples)
    ends = tuple(None if sample.end is None else sample.end.end for sample in request.samples)
    weights = tuple(sample.weights for sample in request.samples)
    return _RESTORED.decode(entry, submit=request.submit, outputs=outputs, ends=ends, weights=weights)


def quarantine_event(entry: record_pb2.RestoredQuarantine) -> QuarantineRestored:
    ages = [(one, max(0.0, entry.unix_now - one.convicted_at)) for one in entry.quarantine.entries]
    # The core's setting decides when one expires.
    entries = [records.QUARANTINED.decode(one, age_seconds=age, expires_seconds=0.0) for one, age in ages]
    return QuarantineRestored(entries=tuple(entries))


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalClock:
    """`booted_at` is the Unix time of the start of the machine, which has the kernel's `boot_id`; empty: unknown."""

    boot_id: str
    booted_at: float

    def now(self) -> float:
        """Returns the time in seconds; the module describes this clock."""
        return self.booted_at + _since_boot()

    def written_at(self, unix_time: float) -> float:
        """Returns when a file was written that has this time of the system's clock, which is not in the future."""
        return self.now() - max(0.0, time.time() - unix_time)


def clock_after(boot_id: str, booted_at: float) -> JournalClock:
    """Returns the clock that goes on with that of an earlier process, if the machine has not been started since."""
    present = _boot_id()
    if not present or boot_id != present:
        booted_at = time.time() - _since_boot()
    return JournalClock(boot_id=present, booted_at=booted_at)


def _since_boot() -> float:
    """Seconds since the start of the machine, those in which it was suspended included."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
