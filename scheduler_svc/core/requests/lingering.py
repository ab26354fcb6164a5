"""Requests that outlive their reader: `Lingering` detaches them, gives them a new reader, and drops them in the end.

A *detached* request has no reader. It waits and runs like any other, but its `frontend` is empty and its stream is its
handle, so that no front end gets its tokens. `kept_requests` keeps what a new reader needs besides the live samples.
`Scheduler` calls this class when a request is accepted, loses its reader or ends.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from scheduler_svc.core.lanes import Lanes
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.messages.effects import WeightsSpan
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.requests.kept_requests import KeptRequest, KeptRequests
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.status import Availability

_NOT_FOUND = (
    "no request with this id and secret can be resumed: it has ended and its linger time is over, or it was given up"
)


class Lingering:
    """`remove` frees a live request without an answer."""

    def __init__(
        self,
        config: CoreConfig,
        queue: RequestQueue,
        lanes: Lanes,
        availability: Availability,
        remove: Callable[[Request, float], object],
    ) -> None:
        self._queue, self._lanes, self._availability, self._remove = queue, lanes, availability, remove
        self.kept = KeptRequests(max_ended=config.max_kept_requests, max_bytes=config.max_kept_bytes)
        # By the first handle: those of the journal that are not queued yet.
        self._restored: dict[int, ev.Restored] = {}

    # Requests ------------------------------------------------------------------------------------------------

    def accepted(self, submit: ev.Submit, first_handle: int, now: float) -> list[fx.Effect]:
        """Begins to keep an accepted request, if it lingers. Forgets an ended request of the same id in any case."""
        effects = self.forget(submit.request_id)
        if submit.lingers:
            self.kept.add(submit, first_handle, now)
        return effects

    def ended(self, request: Request, end: fx.End, num_tokens: int, now: float) -> None:
        """Keeps the answer of a sample that has ended after `num_tokens` output tokens."""
        entry = self.kept.by_id(request.submit.request_id) if request.submit.lingers else None
        if entry is not None:
            tokens = np.concatenate([NO_IDS, *request.outputs])[:num_tokens]
            self.kept.sample_ended(entry, request.sample_idx, (tokens, end), now)

    def canceled(self, request: Request, now: float) -> list[fx.Effect]:
        """Handles a sample that was freed without an answer. Forgets its request if no answer can be complete."""
        entry = self.kept.by_id(request.submit.request_id) if request.submit.lingers else None
        if entry is None:
            return []
        self.kept.sample_ended(entry, request.sample_idx, None, now)
        # A failed sample ends the stream, so nothing is missing without the others.
        if entry.num_live or any(end.failure for _, end in entry.answers.values()):
            return []
        return self.forget(entry.request_id)

    def forget(self, request_id: str) -> list[fx.Effect]:
        """Drops the entry of a request without live samples, if there is one."""
        entry = self.kept.by_id(request_id)
        if entry is None:
            return []
        self.kept.forget(entry)
        self._restored.pop(entry.first_handle, None)
        return [fx.Forgotten(request_id=request_id)]

    def expire(self, now: float) -> list[fx.Effect]:
        """Drops entries whose time is over, with their live samples, and those that exceed the bounds."""
        effects: list[fx.Effect] = []
        if self.kept.next_expiry() is None:
            return effects  # every ended entry expires, so the bounds hold as well
        while (expired := self.kept.pop_expired(now)) is not None:
            for request in self._queue.by_request_id(expired.request_id):
                self._remove(request, now)
            effects += self.forget(expired.request_id)
        while (surplus := self.kept.surplus()) is not None:
            effects += self.forget(surplus.request_id)
        return effects

    def meant(self, request_id: str, others: Iterable[str]) -> str:
        """Returns the first of these ids that a live or kept request has; `request_id` if none has."""
        known = (each for each in (request_id, *others) if self._queue.by_request_id(each) or self.kept.by_id(each))
        return next(known, request_id)

    def awaits_worker(self, request_id: str) -> bool:
        """Whether this is a live request of the journal that is not queued yet."""
        entry = self.kept.by_id(request_id)
        return entry is not None and entry.awaits_worker

    # Readers -------------------------------------------------------------------------------------------------

    def reader_lost(self, frontend: str, stream: int, now: float) -> list[fx.Effect]:
        """Detaches the request whose first stream this is, if it lingers."""
        entry = self.kept.by_reader(frontend, stream)
        return [] if entry is None else self._detach(entry, now)

    def frontend_lost(self, frontend: str, now: float) -> list[fx.Effect]:
        """Detaches all requests of a front end that linger."""
        return [effect for entry in self.kept.of_frontend(frontend) for effect in self._detach(entry, now)]

    def _detach(self, entry: KeptRequest, now: float) -> list[fx.Effect]:
        self.kept.detach(entry, now)
        for request in self._queue.by_request_id(entry.request_id):
            self._attach(request, "", request.handle, 0)
        return [fx.Detached(request_id=entry.request_id, stream=entry.first_handle)]

    def _attach(self, request: Request, frontend: str, stream: int, frontend_idx: int) -> None:
        self._queue.attach(request, frontend, stream)
        if request.row:
            self._lanes.by_worker[request.worker].rows.attach(request.row, stream, frontend_idx)

    def resume(self, event: ev.Resume, frontends: Mapping[str, int], now: float) -> list[fx.Effect]:
        """Makes a front end the reader of a request, instead of the present reader if there is one."""
        request_id = self.meant(event.request_id, event.others)
        entry = self.kept.authorized(request_id, event.secret_hash)
        if entry is None:
            return [_rejected(event, fx.RejectCode.NOT_FOUND, _NOT_FOUND)]
        if entry.awaits_worker:
            return [_rejected(event, fx.RejectCode.NOT_READY, self._availability.why_no_model)]
        streams = range(event.stream, event.stream + entry.num_samples)
        if any(self._queue.by_stream(event.frontend, stream) for stream in streams):
            return [_rejected(event, fx.RejectCode.DUPLICATE, f"a stream from {event.stream} on is in use")]
        effects: list[fx.Effect] = []
        if entry.reader is not None:
            effects.append(fx.Replaced(frontend=entry.reader[0], stream=entry.reader[1]))
        self.kept.attach(entry, event.frontend, event.stream)
        if not entry.num_live:
            self.kept.refresh(entry, now)
        ends = {sample_idx: replace(end, stream=streams[sample_idx]) for sample_idx, (_, end) in entry.answers.items()}
        for request in self._queue.by_request_id(request_id):
            self._attach(request, event.frontend, streams[request.sample_idx], frontends[event.frontend])
        resumed = fx.Resumed(
            frontend=event.frontend,
            stream=event.stream,
            request_id=entry.request_id,
            description=entry.description,
            outputs=self.outputs_of(request_id),
            ends=tuple(ends.get(sample_idx) for sample_idx in range(entry.num_samples)),
        )
        return [*effects, resumed]

    def outputs_of(self, request_id: str) -> tuple[Int32Array, ...]:
        """Returns all output tokens of each sample of a request that lingers."""
        entry = self.kept.by_id(request_id)
        assert entry is not None, f"request {request_id} is not kept"
        if entry.awaits_worker:
            return self._restored[entry.first_handle].outputs
        outputs = [NO_IDS for _ in range(entry.num_samples)]
        for sample_idx, (tokens, _) in entry.answers.items():
            outputs[sample_idx] = tokens
        for request in self._queue.by_request_id(request_id):
            outputs[request.sample_idx] = self._outputs_of(request)
        return tuple(outputs)

    def spans_of(self, request_id: str) -> dict[int, Sequence[WeightsSpan]]:
        """Returns the spans by weights of each live sample of a request that lingers."""
        entry = self.kept.by_id(request_id)
        assert entry is not None, f"request {request_id} is not kept"
        if entry.awaits_worker:
            return dict(enumerate(self._restored[entry.first_handle].weights))
        return {request.sample_idx: request.weights.spans for request in self._queue.by_request_id(request_id)}

    def _outputs_of(self, request: Request) -> Int32Array:
        """Returns all output tokens of a live request."""
        if not request.row:
            return request.tokens_between(request.prompt_tokens, request.known)
        rows = self._lanes.by_worker[request.worker].rows
        return rows.tokens_between(request.row, request.prompt_tokens, int(rows.known[request.row])).copy()

    # The journal ---------------------------------------------------------------------------------------------

    def restored(self, event: ev.Restored, first_handle: int, now: float) -> list[fx.Effect]:
        """Keeps a request of an earlier process. Its live samples wait for `take_restored`."""
        submit = replace(event.submit, frontend="", stream=first_handle)
        entry = self.kept.add(submit, first_handle, now - event.age_seconds)
        for sample_idx, (tokens, end) in enumerate(zip(event.outputs, event.ends, strict=True)):
            if end is not None:
                self.kept.sample_ended(entry, sample_idx, (tokens, end), now)
        self.kept.detach(entry, now, event.linger_seconds)
        if entry.num_live:
            entry.awaits_worker = True
            self._restored[first_handle] = replace(event, submit=submit)
        return [fx.Detached(request_id=entry.request_id, stream=first_handle)]

    def restored_of(self, entry: KeptRequest) -> ev.Restored:
        """Returns a restored request that is not queued yet. Its submit has the first handle as its stream."""
        return self._restored[entry.first_handle]

    def take_restored(self) -> list[tuple[int, float, ev.Restored]]:
        """Removes and returns the restored requests that are not queued: first handle, time of arrival, event."""
        restored, self._restored = self._restored, {}
        taken: list[tuple[int, float, ev.Restored]] = []
        for first_handle, event in restored.items():
            if (entry := self.kept.by_id(event.submit.request_id)) is not None:
                entry.awaits_worker = False
                taken.append((first_handle, entry.accepted_at, event))
        return taken


def _rejected(event: ev.Resume, code: fx.RejectCode, message: str) -> fx.Rejected:
    return fx.Rejected(frontend=event.frontend, stream=event.stream, code=code, message=message, field="")


def audit_reader(
    request: Request, queue: RequestQueue, kept: KeptRequests, lanes: Mapping[str, Lane], frontends: Mapping[str, int]
) -> None:
    """Checks that a live request has a connected front end, or lingers."""
    frontend, name, entry = request.frontend, request.submit.request_id, kept.by_id(request.submit.request_id)
    assert queue.by_stream(frontend, request.stream) is request, f"{name}: its stream is another's"
    if request.row:
        rows = lanes[request.worker].rows
        reader = int(rows.stream[request.row]), int(rows.frontend_idx[request.row])
        assert reader == (request.stream, frontends.get(frontend, 0)), f"row {request.row} has another reader"
    assert (entry is not None) == request.submit.lingers, f"{name} lingers, and is not kept"
    if entry is None or entry.reader is not None:
        assert frontend in frontends, f"{name} belongs to a front end that is gone"
    if entry is not None:
        first = entry.reader or ("", entry.first_handle)
        assert (frontend, request.stream - request.sample_idx) == first, f"{name} has another reader"


def audit_kept(kept: KeptRequests, queue: RequestQueue) -> None:
    """Checks the requests that linger: each is live or expires, and the size of those that ended is right."""
    size = 0
    for entry in kept.all:
        live = queue.by_request_id(entry.request_id)
        assert entry.awaits_worker or len(live) == entry.num_live, f"{entry.request_id}: live samples are miscounted"
        assert not any(request.sample_idx in entry.answers for request in live), f"{entry.request_id} ended and lives"
        assert entry.expires_at is not None or (entry.num_live and entry.reader), f"{entry.request_id} never expires"
        size += 0 if entry.num_live else entry.num_bytes
    assert size == kept.ended_bytes, "the size of the kept answers is miscounted"
