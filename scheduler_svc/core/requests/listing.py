"""The list of requests: those that wait or run, and the answers that are kept, one page for each query.

They are listed in the order of acceptance. A page costs the same whatever the number of requests is: it
looks at no more than `MAX_EXAMINED` of them. Changes no request.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages.effects import Effect
from scheduler_svc.core.messages.events import Restored
from scheduler_svc.core.messages.names import forms, own_id
from scheduler_svc.core.messages.operators import RequestsMark, RequestsQuery, RequestsReply
from scheduler_svc.core.messages.reports import RequestEntry, RequestState, WaitReason
from scheduler_svc.core.queue.kept_requests import KeptRequest
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.status import NOBODY

MAX_EXAMINED = 1024
"""Accepted requests that one page looks at, so that a filter which few requests pass does not hold up the core."""


class Listing(Organ):
    @handles(RequestsQuery)
    def answer(self, query: RequestsQuery, now: float) -> list[Effect]:
        """Returns the page after `query.after`."""
        after, order, epoch = query.after, self._core.accepted.order, self._core.accepted.epoch
        if after is not None and after.epoch != epoch:
            return [RequestsReply(frontend=query.frontend, query=query.query, requests=(), next=None, is_stale=True)]
        last = 0 if after is None else after.number
        # The samples of a request may be on two pages.
        start = max(0, bisect_right(order, last, key=itemgetter(0)) - 1)
        end = start + MAX_EXAMINED
        found: list[RequestEntry] = []
        is_full = False
        for number, entry in self._matching(order[start:end], query, last, now):
            if is_full := len(found) == query.page_size:
                break
            found.append(entry)
            last = number
        if not is_full:
            last = max(last, order[end - 1][0]) if end < len(order) else 0
        mark = RequestsMark(number=last, epoch=epoch) if last else None
        return [RequestsReply(frontend=query.frontend, query=query.query, requests=tuple(found), next=mark)]

    def _matching(
        self, accepted: list[tuple[int, str]], query: RequestsQuery, last: int, now: float
    ) -> Iterator[tuple[int, RequestEntry]]:
        """Yields the number and the entry of each sample after `last` that the query wants."""
        prefixes, states = forms(query.id_prefix), query.states
        for first, name in accepted:
            live, kept = self._core.accepted.of(first, name)
            if not (live or kept):
                continue
            tenant = live[0].submit.tenant if live else kept.tenant if kept else ""
            if query.tenant is not None and tenant != query.tenant:
                continue
            if query.id_prefix and not own_id(name, tenant).startswith(prefixes):
                continue
            if kept is None:
                for request in live:
                    if request.handle > last and (not states or _state(request) in states):
                        yield request.handle, self._live(request, None, now)
                continue
            for idx, request, state in _samples(live, kept):
                if first + idx > last and (not states or state in states):
                    yield first + idx, self._entry(request, kept, idx, now)

    def _entry(self, request: Request | None, kept: KeptRequest, sample_idx: int, now: float) -> RequestEntry:
        """Returns the entry of a sample of a kept request; `request` is the sample if it is live."""
        if request is not None:
            return self._live(request, kept, now)
        if sample_idx in kept.answers:
            return _answer(kept, sample_idx, now)
        assert kept.restored is not None, "a sample that is neither live nor ended waits for a worker"
        return self._restored(kept, kept.restored, sample_idx, now)

    def _live(self, request: Request, kept: KeptRequest | None, now: float) -> RequestEntry:
        why, spans = self._core.waits.why(request, now), request.weights.spans
        output, version = request.num_outputs, spans[-1].version if spans else ""
        if request.row:
            lane = self._lanes[request.worker]
            output = int(lane.rows.known[request.row]) - request.prompt_tokens
            version = lane.info.weights_version
        return RequestEntry(
            request_id=own_id(request.submit.request_id, request.submit.tenant),
            tenant=request.submit.tenant,
            state=_state(request),
            wait_reason=why and why[0],
            wait_message=why[1] if why else "",
            age_seconds=now - request.arrived_at,
            prompt_tokens=request.prompt_tokens,
            output_tokens=output,
            max_new_tokens=request.total_length - request.prompt_tokens,
            priority=request.submit.priority,
            sample_idx=request.sample_idx,
            num_samples=request.submit.num_samples,
            worker=request.worker,
            weights_version=version,
            is_detached=not request.frontend,
            seconds_left=_left(request.submit.ends_at(request.arrived_at), kept and kept.expires_at, now),
        )

    def _restored(self, kept: KeptRequest, event: Restored, sample_idx: int, now: float) -> RequestEntry:
        """Returns the entry of a sample from the journal that is not queued yet."""
        blocked = self._core.availability.blocked
        spans, submit = event.weights[sample_idx] if event.weights else (), event.submit
        return RequestEntry(
            request_id=own_id(kept.request_id, kept.tenant),
            tenant=kept.tenant,
            state=RequestState.WAITING,
            wait_reason=WaitReason.NO_WORKER if blocked is None else blocked.reason,
            wait_message=NOBODY if blocked is None else blocked.message,
            age_seconds=now - kept.accepted_at,
            prompt_tokens=len(submit.prompt),
            output_tokens=len(event.outputs[sample_idx]),
            max_new_tokens=submit.max_new_tokens,
            priority=submit.priority,
            sample_idx=sample_idx,
            num_samples=kept.num_samples,
            weights_version=spans[-1].version if spans else "",
            is_detached=True,
            seconds_left=_left(submit.ends_at(kept.accepted_at), kept.expires_at, now),
        )


def _samples(live: Sequence[Request], kept: KeptRequest) -> Iterator[tuple[int, Request | None, RequestState]]:
    """Yields the index, the live request and the state of each sample of a kept request that is not gone."""
    by_idx = {request.sample_idx: request for request in live}
    for idx in range(kept.num_samples):
        request = by_idx.get(idx)
        if idx in kept.answers:
            yield idx, request, RequestState.KEPT
        elif request is not None or kept.restored is not None:
            yield idx, request, _state(request)


def _state(request: Request | None) -> RequestState:
    return RequestState.RUNNING if request is not None and request.row else RequestState.WAITING


def _answer(kept: KeptRequest, sample_idx: int, now: float) -> RequestEntry:
    """Returns the entry of a sample that has ended."""
    tokens, end = kept.answers[sample_idx]
    spans = end.stats.weights
    return RequestEntry(
        request_id=own_id(kept.request_id, kept.tenant),
        tenant=kept.tenant,
        state=RequestState.KEPT,
        age_seconds=now - kept.accepted_at,
        prompt_tokens=end.stats.prompt_tokens,
        output_tokens=len(tokens),
        sample_idx=sample_idx,
        num_samples=kept.num_samples,
        weights_version=spans[-1].version if spans else "",
        is_detached=kept.reader is None,
        seconds_left=_left(kept.expires_at, None, now),
    )


def _left(one: float | None, other: float | None, now: float) -> float | None:
    """Returns the time until the earlier of two times; None without one."""
    times = [at for at in (one, other) if at is not None]
    return max(0.0, min(times) - now) if times else None
