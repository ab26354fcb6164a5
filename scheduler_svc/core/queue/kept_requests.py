"""Requests that linger: their secrets, their readers, the answers of their ended samples, and when each is dropped.

A request lingers if its caller may resume it. Its entry is made when it is accepted. The entry outlives the request: it
keeps the tokens and the end of each ended sample. Live samples are in the `RequestQueue` as always.

**Times.** An entry expires `linger_seconds` after it lost its reader, or after its last sample ended, whichever came
last before the caller was back. An entry with a reader and a live sample does not expire.

**Bounds.** The entries of live requests are bounded like these. At most `max_ended` others with `max_bytes` are kept;
the one that ended first is dropped first.
"""

import hmac
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.effects import Effect, End, Forgotten
from scheduler_svc.core.messages.events import Restored, Submit
from scheduler_svc.core.queue.request_queue import ExpiryHeap, RequestQueue
from scheduler_svc.core.state.request import Request

# What an entry takes besides its tokens and its description, as counted in `max_bytes`.
ENTRY_BYTES = 1024
_NO_HASH = bytes(32)


@dataclass(slots=True, kw_only=True, eq=False)
class KeptRequest:
    """A submitted request that lingers, with all its samples."""

    submit: Submit
    """As it came, without its prompt and what else may be large, but with its description."""
    accepted_at: float
    """When, on the core's clock, the request was accepted, perhaps by an earlier process."""
    first_handle: int
    """The handle of the first sample; sample i has `first_handle + i`. Without a reader it is also the first stream."""
    num_live: int
    """Number of samples that have not ended."""
    reader: tuple[str, int] | None = None
    """The front end and the first sample's stream; None without a reader."""
    answers: dict[int, tuple[Int32Array, End]] = field(default_factory=dict[int, tuple[Int32Array, End]])
    """The tokens and the end of each ended sample, by its index."""
    expires_at: float | None = None
    """When, on the core's clock, the entry is dropped; None while it has a reader and a live sample."""
    restored: Restored | None = None
    """What the journal had of it, while its live samples are not queued because no worker has been proven."""
    num_bytes: int = 0
    """Size of the description and the answers."""


class KeptRequests:
    """All entries by request id. An id has at most one entry."""

    def __init__(self, *, max_ended: int, max_bytes: int) -> None:
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._by_id: dict[str, KeptRequest] = {}
        self.by_id = self._by_id.get
        """Returns the entry with an id, or None."""
        self._by_reader: dict[tuple[str, int], KeptRequest] = {}
        self.by_reader = self._by_reader.get
        """Returns the entry with a reader of this front end and first stream, or None."""
        # Entries without live samples, the first one that ended first.
        self._ended: dict[str, KeptRequest] = {}
        self.ended_bytes = 0
        """Size of the entries without live samples."""
        self._expiries = ExpiryHeap[KeptRequest](lambda due: due[2].expires_at == due[0])
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def all(self) -> list[KeptRequest]:
        """All entries, in the order in which their requests arrived."""
        return list(self._by_id.values())

    def authorized(self, request_id: str, secret_hash: bytes) -> KeptRequest | None:
        """Returns the entry with this id and secret, or None. The comparison takes the same time for any hash."""
        entry = self._by_id.get(request_id)
        is_same = hmac.compare_digest(_NO_HASH if entry is None else entry.submit.secret_hash, secret_hash)
        return entry if is_same else None

    def add(self, submit: Submit, first_handle: int, accepted_at: float) -> KeptRequest:
        """Adds an entry; `accepted_at` is on the core's clock. An ended one of its id must be forgotten."""
        assert submit.request_id not in self._by_id, f"request {submit.request_id} is kept already"
        kept = replace(submit, prompt=NO_IDS, sampling=b"", page_hashes=b"", resources=())
        entry = KeptRequest(
            submit=kept,
            accepted_at=accepted_at,
            first_handle=first_handle,
            num_live=submit.num_samples,
            num_bytes=ENTRY_BYTES + len(submit.description),
        )
        self._by_id[submit.request_id] = entry
        if submit.frontend:
            self.attach(entry, submit.frontend, submit.stream, accepted_at)
        return entry

    def attach(self, entry: KeptRequest, frontend: str, stream: int, now: float) -> None:
        """Makes the front end the entry's reader. The linger time of a request that has ended begins again."""
        self._drop_reader(entry)
        entry.reader = frontend, stream
        self._by_reader[frontend, stream] = entry
        if entry.num_live:
            entry.expires_at = None
        else:
            self._expire_at(entry, now + entry.submit.linger_seconds)

    def detach(self, entry: KeptRequest, now: float, linger_seconds: float | None = None) -> None:
        """Records that the entry has no reader any more. It expires after its own linger time, or after another one."""
        self._drop_reader(entry)
        self._expire_at(entry, now + (entry.submit.linger_seconds if linger_seconds is None else linger_seconds))

    def sample_ended(
        self, entry: KeptRequest, sample_idx: int, answer: tuple[Int32Array, End] | None, now: float
    ) -> None:
        """Keeps the answer of a sample that has ended; None if it was freed without one."""
        if answer is not None:
            entry.answers[sample_idx] = answer
            entry.num_bytes += answer[0].nbytes
        entry.num_live -= 1
        assert entry.num_live >= 0, f"request {entry.submit.request_id}: more samples ended than it has"
        if entry.num_live:
            return
        self._ended[entry.submit.request_id] = entry
        self.ended_bytes += entry.num_bytes
        if entry.reader is not None:
            self._expire_at(entry, now + entry.submit.linger_seconds)

    def ended(self, request: Request, end: End, num_tokens: int, now: float) -> None:
        """Keeps the answer of a sample that has ended after `num_tokens` output tokens, if it lingers."""
        entry = self.by_id(request.submit.request_id) if request.submit.lingers else None
        if entry is not None:
            tokens = np.concatenate([NO_IDS, *request.outputs])[:num_tokens]
            self.sample_ended(entry, request.sample_idx, (tokens, end), now)

    def canceled(self, request: Request, now: float) -> list[Effect]:
        """Handles a sample that was freed without an answer. Forgets its request if no answer can be complete."""
        entry = self.by_id(request.submit.request_id) if request.submit.lingers else None
        if entry is None:
            return []
        self.sample_ended(entry, request.sample_idx, None, now)
        # A failed sample ends the stream, so nothing is missing without the others.
        if entry.num_live or any(end.failure for _, end in entry.answers.values()):
            return []
        return self.forget(entry.submit.request_id)

    def forget(self, request_id: str) -> list[Effect]:
        """Drops the entry of a request without live samples, if there is one."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return []
        self._drop_reader(entry)
        entry.expires_at = None
        if self._ended.pop(request_id, None) is not None:
            self.ended_bytes -= entry.num_bytes
        return [Forgotten(request_id=request_id)]

    def take_restored(self) -> list[tuple[int, float, Restored]]:
        """Takes the restored requests that the caller queues now: first handle, time of arrival, event."""
        waiting = [(entry, entry.restored) for entry in self._by_id.values() if entry.restored is not None]
        for entry, _ in waiting:
            entry.restored = None
        return [(entry.first_handle, entry.accepted_at, restored) for entry, restored in waiting]

    def pop_due(self, now: float) -> KeptRequest | None:
        """Takes an entry that must be forgotten, if there is one: its time is over, or too much is kept."""
        if (due := self._expiries.pop(now, len(self))) is not None:
            return due[2]
        if len(self._ended) <= self._max_ended and self.ended_bytes <= self._max_bytes:
            return None
        return next(iter(self._ended.values()))

    def next_expiry(self) -> float | None:
        """Returns the earliest expiry on the core's clock, or None. It may be stale."""
        return self._expiries.next()

    def _expire_at(self, entry: KeptRequest, at: float) -> None:
        entry.expires_at = at
        self._next_number += 1
        self._expiries.add(at, self._next_number, entry)

    def _drop_reader(self, entry: KeptRequest) -> None:
        if entry.reader is not None:
            del self._by_reader[entry.reader]
            entry.reader = None


class Accepted:
    """The handles of requests, which are never used twice, and the order of acceptance, in which they are listed."""

    def __init__(self, queue: RequestQueue, kept: KeptRequests) -> None:
        self._queue, self._kept = queue, kept
        self.order: list[tuple[int, str]] = []
        """The first handle and the id of each accepted request, ascending. Those that are gone are dropped at times."""
        self.epoch = -1.0
        """When the first request was accepted: no other core has the same."""
        self._next_handle = 1

    def take_handles(self, count: int) -> int:
        """Takes `count` new handles, and returns the first."""
        first, self._next_handle = self._next_handle, self._next_handle + count
        return first

    def record(self, first_handle: int, request_id: str, now: float) -> None:
        """Records the order of a request that was accepted, or restored."""
        if self.epoch < 0:
            self.epoch = now
        self.order.append((first_handle, request_id))
        if len(self.order) > 2 * (len(self._queue) + len(self._kept)) + 64:
            self.order = [mark for mark in self.order if any(self.of(*mark))]

    def of(self, first: int, name: str) -> tuple[tuple[Request, ...], KeptRequest | None]:
        """Returns the live samples and the kept answers of a request. A later one may have the id of one that ended."""
        live, kept = self._queue.by_request_id(name), self._kept.by_id(name)
        if live and live[0].handle - live[0].sample_idx != first:
            live = ()
        return live, None if kept is None or kept.first_handle != first else kept
