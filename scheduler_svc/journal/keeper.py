"""Derives the journal's records from what the core does: the requests that linger, their tokens and their ends.

Owns the kept requests by id, the streams that they have now, and what was written last of suspects and quarantine. It
sees every event and its effects (`handled`), and writes at the end of a turn (`sending`), before any front end gets the
turn's tokens. Only requests that linger are kept, because no other one can be resumed.
"""

import logging
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tandem.internal.v1 import journal_pb2, record_pb2

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.operators import Weights
from scheduler_svc.core.messages.page_hash import HASH_BYTES
from scheduler_svc.core.requests.lingering import outputs_of, spans_of
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state.request import Request
from scheduler_svc.journal import reader, records
from scheduler_svc.journal.file import JournalFolder, JournalWriter, Sync
from scheduler_svc.journal.reader import SavedCore, clock_after, event_of, quarantine_event, wanted
from scheduler_svc.journal.records import SampleEnd, SavedRequest, SavedSample, end_arguments, kept_submit, record
from scheduler_svc.observer import Observer
from tandem_contract.codec import packed
from tandem_contract.plural import numbered


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    # As it was accepted or restored; outputs and weights are the core's.
    saved: SavedRequest
    ends: list[SampleEnd | None]
    frontend: str = ""
    stream: int = 0


class KeptStreams:
    """The streams of one front end, or of none: ranges that do not overlap, each of one request."""

    def __init__(self) -> None:
        # By the first stream.
        self._ranges: dict[int, _Kept] = {}
        self._is_sorted = False
        self._starts = self._lasts = self._shifts = np.zeros(0, np.uint64)

    def add(self, request: _Kept) -> None:
        self._ranges[request.stream] = request
        self._is_sorted = False

    def remove(self, request: _Kept) -> bool:
        """Removes the request's streams, if it has them still. Returns whether no range is left."""
        if self._ranges.get(request.stream) is request:
            del self._ranges[request.stream]
            self._is_sorted = False
        return not self._ranges

    def find(self, stream: int) -> tuple[_Kept, int] | None:
        """Returns the request of a stream and the index of its sample, None if it is not kept."""
        self._sort()
        i = int(self._starts.searchsorted(np.uint64(stream), "right")) - 1
        if i < 0 or stream > int(self._lasts[i]):
            return None
        start = int(self._starts[i])
        return self._ranges[start], stream - start

    def numbers(self, streams: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Returns the number of each stream, uint64[n], and which of them are kept, bool[n]; None if all are."""
        self._sort()
        i = self._starts.searchsorted(streams, "right")
        # An index of 0 becomes the last range, which ends above or begins above the stream; both are checked.
        i -= 1
        is_kept = (streams >= self._starts[i]) & (streams <= self._lasts[i])
        # Unsigned sums wrap around, so a shift may be negative.
        return streams + self._shifts[i], None if is_kept.all() else is_kept

    def _sort(self) -> None:
        if self._is_sorted:
            return
        self._is_sorted = True
        starts = sorted(self._ranges)
        saved = [self._ranges[start].saved for start in starts]
        self._starts = np.array(starts, np.uint64)
        # The last one, not the end, which may be 2**64.
        self._lasts = self._starts + np.array([one.submit.num_samples - 1 for one in saved], np.uint64)
        self._shifts = np.array([one.number for one in saved], np.uint64) - self._starts


log = logging.getLogger("tandem.core")

# A scheduler that has run this long with a journal was not crashed by it.
_STEADY_SECONDS = 10.0


class JournalKeeper(Observer):
    """The kept requests. `restore` comes before everything else."""

    def __init__(self, journal: "OpenedJournal", core: Scheduler) -> None:
        self._journal, self._core = journal, core
        self._state = journal_pb2.JournalState(
            cache_root=journal.cache_root,
            next_generation=journal.first_generation + _GENERATIONS,
            boot_id=journal.clock.boot_id,
            booted_at=journal.clock.booted_at,
        )
        for name in ("identity", "weights_version", "weights_folder"):
            setattr(self._state, name, getattr(journal.saved.state, name))
        # Handles of the suspects, and the revision of the quarantine, that were written last.
        self._suspects, self._revision = set[int](), 0
        # Numbers of the earlier scheduler's suspects.
        self._restored_suspects = journal.saved.suspects
        self._clock = journal.clock.now
        self._steady_at = 0.0
        self._next_number = journal.saved.next_number
        self._by_id: dict[str, _Kept] = {}
        self._streams: dict[str, KeptStreams] = {}
        self._payloads: list[bytes] = []
        self._drops, self._now = False, 0.0  # The core's clock at the last write.
        self._writer: JournalWriter | None = None

    def restore(self, handle: Callable[..., list[fx.Effect]], now: float) -> list[fx.Effect]:
        """Gives the core what the earlier scheduler knew, then begins a new file. Returns the core's effects.

        `handle` takes an event, and by keyword its entry for the event log.
        """
        effects: list[fx.Effect] = []
        journal = self._journal
        saved, journal.saved = journal.saved, SavedCore()
        if saved.quarantine.entries:
            quarantine = record_pb2.RestoredQuarantine(quarantine=saved.quarantine, unix_now=self._clock())
            effects += handle(quarantine_event(quarantine), quarantine_restored=quarantine)
        if saved.state.weights_version:
            weights = Weights(version=saved.state.weights_version, folder=saved.state.weights_folder)
            entry = record_pb2.WeightsRestored(version=weights.version, folder=weights.folder)
            effects += handle(ev.WeightsRestored(weights=weights), weights_restored=entry)
        for request, entry in wanted(saved, self._clock()):
            ends = [sample.end for sample in request.samples]
            kept = replace(request, submit=kept_submit(request.submit, ends), samples=())
            self._by_id[request.submit.request_id] = _Kept(saved=kept, ends=ends)
            effects += handle(event_of(entry), restored=entry)
        if saved.requests:
            late = len(saved.requests) - len(self._by_id)
            log.info(
                "%s on from the journal; the time of %d is over", numbered(len(self._by_id), "request", "go"), late
            )
        self._now, self._steady_at = now, now + _STEADY_SECONDS
        self._writer = JournalWriter(
            journal.folder, snapshot=self.snapshot, max_bytes=journal.max_bytes, sync=journal.sync, now=now
        )
        return effects

    def handled(self, now: float, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """Notes what an event did to the kept requests."""
        if isinstance(event, ev.FrontendLost | ev.FrontendJoined):
            # Its streams are gone, and a successor may use their numbers again.
            self._streams.pop(event.frontend, None)
        for effect in effects:
            match effect:
                case fx.StepOutput():
                    if effect.frontend in self._streams:
                        self._output(effect, self._streams[effect.frontend])
                case fx.Admitted():
                    if isinstance(event, ev.Submit) and event.linger_seconds > 0:
                        self._accepted(event)
                case fx.Resumed():
                    self._attach(effect.request_id, effect.frontend, effect.stream)
                case fx.Detached():
                    self._attach(effect.request_id, "", effect.stream)
                case fx.Forgotten():
                    self._forget(effect.request_id)
                case fx.ModelServed():
                    if effect.info is not None and effect.info.identity != self._state.identity:
                        self._state.identity = effect.info.identity
                        self._payloads.append(record(state=self._state))
                case fx.WeightsChanged():
                    self._state.weights_version = effect.weights.version
                    self._state.weights_folder = effect.weights.folder
                    self._payloads.append(record(state=self._state))
                case _:
                    pass

    def sending(self, now: float) -> None:
        """Writes the records of this turn: a token that a caller gets is in the journal."""
        assert self._writer is not None, "the journal was not restored"
        self._now = now
        self._payloads += self._suspicion(everything=False)
        if self._payloads:
            payloads, self._payloads = self._payloads, []
            drops, self._drops = self._drops, False
            self._writer.append(payloads, now, drops=drops)
        self._writer.mark_requests(bool(self._by_id))
        self._writer.maintain(now)
        if now >= self._steady_at:
            self._steady()

    def _steady(self) -> None:
        """The scheduler has run for a while, or ends in order."""
        self._journal.folder.forget_crashes()
        self._steady_at = inf

    def described(self, effects: list[fx.Effect]) -> list[fx.Effect]:
        """Returns the effects; each LoadReply also has the state of the journal."""
        writer = self._writer
        if writer is None or not any(isinstance(effect, fx.LoadReply) for effect in effects):
            return effects
        state = {"journal_bytes": writer.size, "journal_suspended": writer.suspended}
        return [
            replace(effect, load=replace(effect.load, **state)) if isinstance(effect, fx.LoadReply) else effect
            for effect in effects
        ]

    def close(self, now: float) -> None:
        """Leaves a journal of what can still be resumed."""
        if self._writer is not None:
            self.sending(now)
            self._steady()
            self._writer.close(now)

    def snapshot(self) -> Iterator[bytes]:
        """Yields the records of a file that contains only what is kept now, this turn included."""
        self._payloads.clear()
        yield record(state=self._state)
        yield from self._suspicion(everything=True)
        for request_id, kept in self._by_id.items():
            weights = spans_of(self._core, request_id)
            outputs = zip(outputs_of(self._core, request_id), kept.ends, strict=True)
            samples = tuple(
                SavedSample(tokens=tokens, end=end, weights=tuple(weights.get(i, ())))
                for i, (tokens, end) in enumerate(outputs)
            )
            yield record(request=records.REQUEST.encode(replace(kept.saved, samples=samples)))

    def _suspicion(self, *, everything: bool) -> Iterator[bytes]:
        """Yields records of the suspects and of the quarantine; if not of `everything`, of what has changed."""
        suspects, quarantine = self._core.suspects.handles, self._core.quarantine
        if everything or suspects != self._suspects:
            self._suspects = suspects
            requests = map(self._core.queue.by_handle, sorted(suspects))
            numbers = [number for request in requests if request and (number := self._number_of(request)) is not None]
            if self._core.info is None:
                # Restored requests cannot be suspects before they are queued, when the first worker has been proven.
                numbers += sorted(self._restored_suspects)
            yield record(suspects={"numbers": packed(np.array(numbers, np.uint64))})
        if everything or quarantine.revision != self._revision:
            self._revision = quarantine.revision
            unix_now = self._clock()
            entries = [
                {"convicted_at": unix_now - entry.age_seconds, **records.QUARANTINED.encode(entry)}
                for entry in quarantine.report(self._now)
            ]
            yield record(quarantine={"entries": entries})

    def _number_of(self, request: Request) -> int | None:
        kept = self._by_id.get(request.submit.request_id) if request.submit.lingers else None
        return None if kept is None else kept.saved.number + request.sample_idx

    def _accepted(self, submit: ev.Submit) -> None:
        # What workers cut is known of those that are there now: smaller ones may be the first to come back. One that
        # is cut ends where their room does, as with an unset maximum.
        most = self._core.queue.by_request_id(submit.request_id)[0].total_length - len(submit.prompt)
        is_max_unset = submit.is_max_unset or most < submit.max_new_tokens
        submit = replace(submit, max_new_tokens=most, is_max_unset=is_max_unset)
        saved = SavedRequest(number=self._next_number, accepted_at=self._clock(), submit=submit)
        self._next_number = saved.numbers.stop
        self._by_id[submit.request_id] = _Kept(saved=saved, ends=[None] * submit.num_samples)
        self._attach(submit.request_id, submit.frontend, submit.stream)
        self._payloads.append(record(request=records.REQUEST.encode(saved)))

    def _attach(self, request_id: str, frontend: str, stream: int) -> None:
        kept = self._by_id.get(request_id)
        if kept is None:
            return
        self._leave(kept)
        kept.frontend, kept.stream = frontend, stream
        self._streams.setdefault(frontend, KeptStreams()).add(kept)

    def _forget(self, request_id: str) -> None:
        kept = self._by_id.pop(request_id, None)
        if kept is None:
            return
        self._leave(kept)
        self._drops = True
        self._payloads.append(record(forgotten={"number": kept.saved.number}))

    def _leave(self, kept: _Kept) -> None:
        streams = self._streams.get(kept.frontend)
        if streams is not None and streams.remove(kept):
            del self._streams[kept.frontend]

    def _output(self, effect: fx.StepOutput, streams: KeptStreams) -> None:
        if len(effect.tokens):
            self._tokens(effect, streams)
        for end in effect.ends:
            kept_sample = streams.find(end.stream)
            if kept_sample is not None:
                kept, sample = kept_sample
                sample_end = SampleEnd(end=end, at=self._clock())
                kept.ends[sample] = sample_end
                kept.saved = replace(kept.saved, submit=kept_submit(kept.saved.submit, kept.ends))
                self._payloads.append(record(end=end_arguments(kept.saved.number + sample, sample_end)))

    def _tokens(self, effect: fx.StepOutput, streams: KeptStreams) -> None:
        offsets, tokens = effect.offsets, effect.tokens
        numbers, is_kept = streams.numbers(effect.streams)
        if is_kept is not None:
            numbers, offsets, tokens = numbers[is_kept], offsets[is_kept], tokens[is_kept]
        if len(numbers):
            arrays = {"numbers": packed(numbers), "offsets": packed(offsets), "tokens": packed(tokens)}
            self._payloads.append(record(tokens={**arrays, "weights_version": effect.weights_version}))


# No scheduler resets its lanes this often, and no service starts this often: generations have 64 bits (worker.proto).
_GENERATIONS = 1 << 32


class OpenedJournal:
    """The folder is locked until `stack` closes."""

    def __init__(self, path: Path, *, sync: Sync, max_bytes: int, stack: ExitStack) -> None:
        """Raises SettingError if the folder or the journal in it cannot be used."""
        self.folder, self.sync, self.max_bytes = JournalFolder(path), sync, max_bytes
        stack.callback(self.folder.close)
        self.saved = reader.read(self.folder)
        self.clock = clock_after(self.saved.state.boot_id, self.saved.state.booted_at)
        self.saved.written_at = self.clock.written_at(self.saved.written_at)
        self.cache_root = self.saved.state.cache_root or secrets.token_bytes(HASH_BYTES)
        self.first_generation = self.saved.state.next_generation

    @contextmanager
    def closing(self, keeper: JournalKeeper, monotonic: Callable[[], float]) -> Generator[None]:
        """Closes the keeper at the end. After an error of the core the journal stays as it is, and the crash counts.

        The core's state is not to be trusted then.
        """
        try:
            yield
        except BaseException:
            self.folder.count_crash()
            raise
        keeper.close(monotonic())
