"""The list of requests: those that wait or run, and the answers that are kept, one page for each query.

They are listed in the order of acceptance. A page costs the same for any number of requests: it
looks at no more than `MAX_EXAMINED` of them. Changes no request.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

from scheduler_svc.core.core import Organ, handles
from scheduler_svc.core.messages.effects import Effect, WeightsSpan
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
        entries: list[RequestEntry] = []
        is_full = False
        for number, entry in self._matching(order[start:end], query, last, now):
            if is_full := len(entries) == query.page_size:
                break
            entries.append(entry)
            last = number
        if not is_full:
            last = max(last, order[end - 1][0]) if end < len(order) else 0
        mark = RequestsMark(number=last, epoch=epoch) if last else None
        return [RequestsReply(frontend=query.frontend, query=query.query, requests=tuple(entries), next=mark)]

    def _matching(
        self, accepted: list[tuple[int, str]], query: RequestsQuery, last: int, now: float
    ) -> Iterator[tuple[int, RequestEntry]]:
        """Yields the number and the entry of each sample after `last` that the query wants."""
        prefixes, states = forms(query.id_prefix), query.states
        for first, name in accepted:
            live, kept = self._core.accepted.of(first, name)
            oldest = live[0] if live else kept
            if oldest is None:
                continue
            tenant = oldest.submit.tenant
            if query.tenant is not None and tenant != query.tenant:
                continue
            if query.id_prefix and not own_id(name, tenant).startswith(prefixes):
                continue
            for idx, request, state in _samples(live, kept):
                if first + idx > last and (not states or state in states):
                    yield first + idx, self._entry(request, kept, idx, now)

    def _entry(self, request: Request | None, kept: KeptRequest | None, idx: int, now: float) -> RequestEntry:
        """Returns the entry of a sample; `request` is the sample if it is live, `kept` its request if it lingers."""
        if request is not None:
            submit, arrived_at, fields = request.submit, request.arrived_at, self._live(request, now)
        else:
            assert kept is not None, "a sample that is neither live nor kept"
            is_ended = idx in kept.answers
            submit, arrived_at = kept.submit, kept.accepted_at
            fields = _answer(kept, idx) if is_ended else self._restored(kept, idx)
        ends_at = None if fields["state"] is RequestState.KEPT else submit.ends_at(arrived_at)
        times = [at for at in (ends_at, kept and kept.expires_at) if at is not None]
        return RequestEntry(
            request_id=own_id(submit.request_id, submit.tenant),
            tenant=submit.tenant,
            age_seconds=now - arrived_at,
            sample_idx=idx,
            num_samples=submit.num_samples,
            is_detached=kept is not None and kept.reader is None,
            seconds_left=max(0.0, min(times) - now) if times else None,
            **fields,
        )

    def _live(self, request: Request, now: float) -> dict[str, Any]:
        why, version = self._core.waits.why(request, now), _version(request.weights.spans)
        if request.row:
            version = self._lanes[request.worker].info.weights_version
        return {
            "state": _state(request),
            "wait_reason": why and why[0],
            "wait_message": why[1] if why else "",
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": self._lanes.known(request) - request.prompt_tokens,
            "max_new_tokens": request.total_length - request.prompt_tokens,
            "priority": request.submit.priority,
            "worker": request.worker,
            "weights_version": version,
        }

    def _restored(self, kept: KeptRequest, idx: int) -> dict[str, Any]:
        """Returns the entry of a sample from the journal that is not queued yet."""
        blocked, event = self._core.availability.blocked, kept.restored
        assert event is not None, "a sample that is neither live nor ended waits for a worker"
        return {
            "state": RequestState.WAITING,
            "wait_reason": WaitReason.NO_WORKER if blocked is None else blocked.reason,
            "wait_message": NOBODY if blocked is None else blocked.message,
            "prompt_tokens": len(event.submit.prompt),
            "output_tokens": len(event.outputs[idx]),
            "max_new_tokens": event.submit.max_new_tokens,
            "priority": event.submit.priority,
            "weights_version": _version(event.weights[idx] if event.weights else ()),
        }


def _samples(live: Sequence[Request], kept: KeptRequest | None) -> Iterator[tuple[int, Request | None, RequestState]]:
    """Yields the index, the live request and the state of each sample of a request that is not gone."""
    by_idx = {request.sample_idx: request for request in live}
    for idx in by_idx if kept is None else range(kept.submit.num_samples):
        request = by_idx.get(idx)
        if kept is not None and idx in kept.answers:
            yield idx, request, RequestState.KEPT
        elif request is not None or (kept is not None and kept.restored is not None):
            yield idx, request, _state(request)


def _state(request: Request | None) -> RequestState:
    return RequestState.RUNNING if request is not None and request.row else RequestState.WAITING


def _answer(kept: KeptRequest, idx: int) -> dict[str, Any]:
    """Returns the entry of a sample that has ended."""
    tokens, end = kept.answers[idx]
    stats = end.stats
    entry = {"state": RequestState.KEPT, "prompt_tokens": stats.prompt_tokens, "output_tokens": len(tokens)}
    return entry | {"weights_version": _version(stats.weights)}


def _version(spans: Sequence[WeightsSpan]) -> str:
    return spans[-1].version if spans else ""
