"""Asserts that the list of requests is what callers know: all of it at once, and in pages while requests come and go.

The queries go past the episode's record and its random numbers, so they change no session.
"""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.names import own_id
from scheduler_svc.core.messages.operators import MAX_PAGE_SIZE, RequestsMark, RequestsQuery, RequestsReply
from scheduler_svc.core.messages.reports import RequestEntry, RequestState
from scheduler_svc.core.scheduler import Scheduler
from tests.simulation.callers import Caller, Callers
from tests.simulation.lingering import Lingering

_Key = tuple[str, str, int]


class Lister:
    """Lists the requests of a core at random moments."""

    def __init__(
        self, seed: int, core: Scheduler, callers: Callers, lingering: Lingering, events: Counter[str]
    ) -> None:
        """`events` counts the lists that were read to their end, page by page, while the episode went on."""
        self._rng = random.Random(seed)
        self._core, self._callers, self._lingering, self._events = core, callers, lingering, events
        self._begin()

    def _begin(self) -> None:
        self._mark: RequestsMark | None = None
        self._seen, self._at_start = list[_Key](), set[_Key]()

    def look(self, now: float) -> None:
        """Compares the whole list, or reads one more page of the list that was begun."""
        move = self._rng.random()
        if move < 0.02:
            self._check_all(now)
        elif move < 0.2:
            self._turn_page(now)

    def _expected(self) -> list[Caller]:
        return [
            caller for caller in self._callers.all
            if caller.live or (caller.end is not None and caller.submit.request_id in self._lingering.kept)
        ]  # fmt: skip

    def _ask(self, now: float, page_size: int, after: RequestsMark | None, **query: object) -> RequestsReply:
        event = RequestsQuery(frontend="f", query=5, page_size=page_size, after=after, **query)  # type: ignore[arg-type]
        [reply] = self._core.handle(event, now)
        assert isinstance(reply, RequestsReply)
        assert not reply.is_stale and len(reply.requests) <= page_size
        return reply

    def _all(self, now: float, **query: object) -> list[RequestEntry]:
        found, mark = list[RequestEntry](), None
        while True:
            reply = self._ask(now, MAX_PAGE_SIZE, mark, **query)
            found += reply.requests
            if (mark := reply.next) is None:
                return found

    def _check_all(self, now: float) -> None:
        expected, found = self._expected(), self._all(now)
        assert list(map(_key, found)) == list(map(_key_of, expected))
        for caller, entry in zip(expected, found, strict=True):
            _check(caller, entry, now)
            others = self._callers.of_request(caller.submit.request_id)
            may_stay = not entry.is_detached and any(each.live for each in others)
            assert entry.state is not RequestState.KEPT or may_stay == (entry.seconds_left is None)
        running = [entry for entry in found if entry.state is RequestState.RUNNING]
        seated = {name: lane.rows.num_seated for name, lane in self._core.lanes.items()}
        assert {name: sum(entry.worker == name for entry in running) for name in seated} == seated
        state = self._rng.choice(list(RequestState))
        assert self._all(now, states=frozenset({state})) == [entry for entry in found if entry.state is state]
        tenant = self._rng.choice(expected).submit.tenant if expected else "nobody"
        assert self._all(now, tenant=tenant) == [entry for entry in found if entry.tenant == tenant]

    def _turn_page(self, now: float) -> None:
        keys = set(map(_key_of, self._expected()))
        if self._mark is None:
            self._begin()
            self._at_start = keys
        reply = self._ask(now, self._rng.randint(1, 4), self._mark)
        page = list(map(_key, reply.requests))
        assert set(page) <= keys
        self._seen += page
        self._mark = reply.next
        if self._mark is None:
            assert len(set(self._seen)) == len(self._seen), "a request is listed twice"
            assert self._at_start & keys <= set(self._seen), "a request that lived throughout is not listed"
            self._events["listed in pages"] += len(self._seen) > 4


def _key(entry: RequestEntry) -> _Key:
    return entry.tenant, entry.request_id, entry.sample_idx


def _key_of(caller: Caller) -> _Key:
    submit = caller.submit
    return submit.tenant, own_id(submit.request_id, submit.tenant), caller.sample_idx


def _check(caller: Caller, entry: RequestEntry, now: float) -> None:
    """Compares an entry with what the caller knows."""
    submit, end = caller.submit, caller.end
    is_kept = entry.state is RequestState.KEPT
    assert is_kept == (end is not None)
    assert entry.age_seconds == pytest.approx(now - caller.arrived_at)
    assert (entry.prompt_tokens, entry.num_samples) == (len(submit.prompt), submit.num_samples)
    is_cut = end is not None and end.reason is fx.EndReason.STOP_STRING
    assert entry.output_tokens == (end.stats.output_tokens if is_cut and end else len(caller.tokens))
    assert entry.is_detached == (submit.frontend == "")
    assert (entry.wait_reason is None) == (entry.wait_message == "")
    if is_kept:
        assert entry.wait_reason is None
        return
    assert entry.priority == submit.priority
    assert entry.output_tokens <= entry.max_new_tokens <= submit.max_new_tokens
    if entry.state is RequestState.WAITING:
        assert entry.wait_reason is not None and entry.worker == ""
    limits = _limits(submit.max_time_seconds, submit.deadline_seconds)
    if limits and not entry.is_detached:
        assert entry.seconds_left == pytest.approx(max(0.0, caller.arrived_at + min(limits) - now))


def _limits(*seconds: float) -> Iterable[float]:
    return [each for each in seconds if each > 0]
