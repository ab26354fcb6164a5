"""Requests that outlive their reader: `Lingering` detaches them, gives them a new reader, and drops them in the end.

A *detached* request has no reader. It waits and runs like any other, but its `frontend` is empty and its stream is its
handle, so that no front end gets its tokens. `kept_requests` keeps what a new reader needs besides the live samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from scheduler_svc.core.core import Core, Organ, handles
from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.arrays import NO_IDS, Int32Array
from scheduler_svc.core.queue.kept_requests import KeptRequest, KeptRequests
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.state.request import Request

_NOT_FOUND = (
    "no request with this id and secret can be resumed: it has ended and its linger time is over, or it was given up"
)


class Lingering(Organ):
    def tick(self, now: float) -> list[fx.Effect]:
        """Drops entries after their time, with their live samples, and those that exceed the bounds."""
        effects: list[fx.Effect] = []
        if self._core.kept.next_expiry() is None:
            return effects  # every ended entry expires, so the bounds hold as well
        while (due := self._core.kept.pop_due(now)) is not None:
            for request in self._queue.by_request_id(due.submit.request_id):
                self._core.remove(request, now)
            effects += self._core.kept.forget(due.submit.request_id)
        return effects

    def next_wake(self) -> float | None:
        return self._core.kept.next_expiry()

    def audit(self) -> None:
        """Checks that live requests have readers or linger, and what is kept of those that linger."""
        for request in self._queue:
            _audit_reader(request, self._core)
        _audit_kept(self._core.kept, self._queue)

    @handles(ev.Resume)
    def resume(self, event: ev.Resume, now: float) -> list[fx.Effect]:
        """Makes a front end the reader of a request, instead of the present reader if there is one."""
        core = self._core
        request_id = meant(core, event.request_id, event.others)
        entry = core.kept.authorized(request_id, event.secret_hash)
        if entry is None:
            return [_rejected(event, fx.RejectCode.NOT_FOUND, _NOT_FOUND)]
        if entry.restored is not None:
            return [_rejected(event, fx.RejectCode.NOT_READY, core.availability.why_no_model)]
        streams = range(event.stream, event.stream + entry.submit.num_samples)
        if any(self._queue.by_stream(event.frontend, stream) for stream in streams):
            return [_rejected(event, fx.RejectCode.DUPLICATE, f"a stream from {event.stream} on is in use")]
        effects: list[fx.Effect] = []
        if entry.reader is not None:
            effects.append(fx.Replaced(frontend=entry.reader[0], stream=entry.reader[1]))
        core.kept.attach(entry, event.frontend, event.stream, now)
        ends = {sample_idx: replace(end, stream=streams[sample_idx]) for sample_idx, (_, end) in entry.answers.items()}
        for request in self._queue.by_request_id(request_id):
            _attach(core, request, event.frontend, streams[request.sample_idx], self._frontends[event.frontend])
        resumed = fx.Resumed(
            frontend=event.frontend,
            stream=event.stream,
            request_id=request_id,
            description=entry.submit.description,
            outputs=outputs_of(core, request_id),
            ends=tuple(ends.get(sample_idx) for sample_idx in range(entry.submit.num_samples)),
        )
        return [*effects, resumed]

    @handles(ev.Restored)
    def restored(self, event: ev.Restored, now: float) -> list[fx.Effect]:
        """Keeps a request of an earlier process. Its live samples wait for `KeptRequests.take_restored`."""
        first_handle = self._core.accepted.take_handles(event.submit.num_samples)
        submit = replace(event.submit, frontend="", stream=first_handle)
        entry = self._core.kept.add(submit, first_handle, now - event.age_seconds)
        for sample_idx, (tokens, end) in enumerate(zip(event.outputs, event.ends, strict=True)):
            if end is not None:
                self._core.kept.sample_ended(entry, sample_idx, (tokens, end), now)
        self._core.kept.detach(entry, now, event.linger_seconds)
        if entry.num_live:
            entry.restored = replace(event, submit=submit)
        self._core.accepted.record(first_handle, event.submit.request_id, now)
        return [fx.Detached(request_id=submit.request_id, stream=first_handle)]


def meant(core: Core, request_id: str, others: Iterable[str]) -> str:
    """Returns the first of these ids that a live or kept request has; `request_id` if none has."""
    living = (name for name in (request_id, *others) if core.queue.by_request_id(name) or core.kept.by_id(name))
    return next(living, request_id)


def detach(core: Core, entry: KeptRequest, now: float) -> list[fx.Effect]:
    """Takes the reader from a request that lingers."""
    core.kept.detach(entry, now)
    for request in core.queue.by_request_id(entry.submit.request_id):
        _attach(core, request, "", request.handle, 0)
    return [fx.Detached(request_id=entry.submit.request_id, stream=entry.first_handle)]


def _attach(core: Core, request: Request, frontend: str, stream: int, frontend_idx: int) -> None:
    core.queue.attach(request, frontend, stream)
    if request.row:
        core.lanes[request.worker].rows.attach(request.row, stream, frontend_idx)


def outputs_of(core: Core, request_id: str) -> tuple[Int32Array, ...]:
    """Returns all output tokens of each sample of a request that lingers."""
    entry = core.kept.by_id(request_id)
    assert entry is not None, f"request {request_id} is not kept"
    if entry.restored is not None:
        return entry.restored.outputs
    outputs = [NO_IDS for _ in range(entry.submit.num_samples)]
    for sample_idx, (tokens, _) in entry.answers.items():
        outputs[sample_idx] = tokens
    for request in core.queue.by_request_id(request_id):
        first, known = request.prompt_tokens, core.lanes.known(request)
        if not request.row:
            outputs[request.sample_idx] = request.tokens_between(first, known)
        else:
            rows = core.lanes[request.worker].rows
            outputs[request.sample_idx] = rows.tokens_between(request.row, first, known).copy()
    return tuple(outputs)


def spans_of(core: Core, request_id: str) -> dict[int, Sequence[fx.WeightsSpan]]:
    """Returns the spans by weights of each live sample of a request that lingers."""
    entry = core.kept.by_id(request_id)
    assert entry is not None, f"request {request_id} is not kept"
    if entry.restored is not None:
        return dict(enumerate(entry.restored.weights))
    return {request.sample_idx: request.weights.spans for request in core.queue.by_request_id(request_id)}


def _rejected(event: ev.Resume, code: fx.RejectCode, message: str) -> fx.Rejected:
    return fx.Rejected(frontend=event.frontend, stream=event.stream, code=code, message=message, field="")


def _audit_reader(request: Request, core: Core) -> None:
    """Checks that a live request has a connected front end, or lingers."""
    frontend, name, entry = request.frontend, request.submit.request_id, core.kept.by_id(request.submit.request_id)
    assert core.queue.by_stream(frontend, request.stream) is request, f"{name}: its stream is another's"
    if request.row:
        rows = core.lanes[request.worker].rows
        reader = int(rows.stream[request.row]), int(rows.frontend_idx[request.row])
        assert reader == (request.stream, core.frontends.get(frontend, 0)), f"row {request.row} has another reader"
    assert (entry is not None) == request.submit.lingers, f"{name} lingers, and is not kept"
    if entry is None or entry.reader is not None:
        assert frontend in core.frontends, f"{name} belongs to a front end that is gone"
    if entry is not None:
        first = entry.reader or ("", entry.first_handle)
        assert (frontend, request.stream - request.sample_idx) == first, f"{name} has another reader"


def _audit_kept(kept: KeptRequests, queue: RequestQueue) -> None:
    """Checks the requests that linger: each is live or expires, and the size of those that ended is right."""
    size = 0
    for entry in kept.all:
        name = entry.submit.request_id
        live = queue.by_request_id(name)
        assert entry.restored or len(live) == entry.num_live, f"{name}: live samples are miscounted"
        assert not any(request.sample_idx in entry.answers for request in live), f"{name} ended and lives"
        assert entry.expires_at is not None or (entry.num_live and entry.reader), f"{name} never expires"
        size += 0 if entry.num_live else entry.num_bytes
    assert size == kept.ended_bytes, "the size of the kept answers is miscounted"
