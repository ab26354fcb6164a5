"""The list of requests: entries, filters, bounded pages while requests come and go, kept answers, the journal."""

from typing import Any

import pytest

from scheduler_svc.core.messages.operators import RequestsMark, RequestsQuery, RequestsReply
from scheduler_svc.core.messages.reports import RequestEntry, RequestState, WaitReason
from scheduler_svc.core.requests import listing
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

ONE_ROW = Shape(max_rows=1)


def ask(world: World, after: RequestsMark | None = None, **query: Any) -> RequestsReply:
    event = RequestsQuery(frontend=FRONTEND, query=3, after=after, **{"page_size": 100, **query})
    [reply] = world.core.handle(event, world.now)
    assert isinstance(reply, RequestsReply)
    assert (reply.frontend, reply.query) == (FRONTEND, 3)
    return reply


def pages(world: World, **query: Any) -> list[list[str]]:
    found, mark = list[list[str]](), None
    while True:
        reply = ask(world, mark, **query)
        found.append([entry.request_id for entry in reply.requests])
        if (mark := reply.next) is None:
            return found


def test_an_empty_core_lists_nothing() -> None:
    assert ask(World(join=False)) == RequestsReply(frontend=FRONTEND, query=3, requests=(), next=None)


def test_an_entry_has_what_is_known_of_a_request_and_none_of_its_content() -> None:
    world = World(ONE_ROW)
    world.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True, priority=2, max_time_seconds=60.0, deadline_seconds=9.0)
    world.submit([4] * 5, max_new_tokens=7, tenant="acme", request_id="acme/b")
    world.steps(3, 0.5)
    running, waiting = ask(world).requests
    tokens = len(world.streams[1].tokens)
    assert 0 < tokens < 20
    assert running == RequestEntry(
        request_id="r1",
        tenant="",
        state=RequestState.RUNNING,
        age_seconds=1.5,
        prompt_tokens=3,
        output_tokens=tokens,
        max_new_tokens=20,
        priority=2,
        sample_idx=0,
        num_samples=1,
        worker=world.worker,
        is_detached=False,
        seconds_left=7.5,
    )
    assert (waiting.request_id, waiting.tenant, waiting.state) == ("b", "acme", RequestState.WAITING)
    assert (waiting.wait_reason, waiting.wait_message[:30]) == (WaitReason.QUEUE, "other requests have the rows (")
    assert (waiting.output_tokens, waiting.max_new_tokens, waiting.worker) == (0, 7, "")
    assert waiting.seconds_left is None


def test_filters() -> None:
    world = World(ONE_ROW)
    world.submit([1], request_id="acme/ab", tenant="acme")
    world.submit([1], request_id="other/ac", tenant="other")
    world.submit([1], request_id="other/b", tenant="other")
    world.step()
    assert pages(world, tenant="other") == [["ac", "b"]]
    assert pages(world, tenant="nobody") == pages(world, tenant="") == [[]]
    assert pages(world, id_prefix="a") == pages(world, id_prefix="cmpl-A") == [["ab", "ac"]]
    assert pages(world, id_prefix="acme") == [[]]
    assert pages(world, states=frozenset({RequestState.RUNNING})) == [["ab"]]
    assert pages(world, states=frozenset({RequestState.WAITING}), tenant="other", id_prefix="b") == [["b"]]


def test_a_page_looks_at_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_EXAMINED", 4)
    world = World(config=greedy(max_waiting=100))
    for number in range(10):
        tenant = "few" if number % 5 == 4 else "many"
        world.submit([1], tenant=tenant, request_id=f"{tenant}/r{number}", max_new_tokens=9)
    # The fourth request is looked at twice, because a page may end among its samples.
    assert pages(world, tenant="few") == [[], ["r4"], ["r9"]]


def test_what_comes_and_goes_between_pages_is_neither_repeated_nor_missed() -> None:
    world = World(Shape(max_rows=1), greedy(max_waiting=1000))
    world.audit_every = 64
    streams = [world.submit([1], max_new_tokens=9) for _ in range(300)]
    first = ask(world, page_size=50)
    # These losses make the core rebuild the order of the list, without the last one of the page and the next ones.
    for stream in streams[20:120]:
        world.cancel(stream)
    for _ in range(1000):
        world.cancel(world.submit([1]))
    late = world.submit([1], max_new_tokens=9)
    assert len(world.core.accepted.order) < 600
    second = ask(world, first.next, page_size=100)
    third = ask(world, second.next, page_size=100)
    names = [entry.request_id for reply in (second, third) for entry in reply.requests]
    assert names == [f"r{stream}" for stream in (*streams[120:], late)]
    assert third.next is None


def test_an_id_that_is_used_again_is_listed_once_at_its_new_place() -> None:
    world = World(ONE_ROW)
    world.submit([1], max_new_tokens=2, request_id="a", linger_seconds=60.0)
    world.submit([1], max_new_tokens=30, ignore_eos=True, request_id="b")
    while world.core.queue.by_request_id("a"):
        world.step()
    assert [(one.request_id, one.state) for one in ask(world).requests] == [
        ("a", RequestState.KEPT),
        ("b", RequestState.RUNNING if world.core.queue.by_request_id("b")[0].row else RequestState.WAITING),
    ]
    world.submit([1], max_new_tokens=5, request_id="a")
    assert pages(world) == [["b", "a"]]


def test_kept_answers_and_detached_requests_are_listed_until_they_are_dropped(world: World) -> None:
    stream = world.submit([1, 2], max_new_tokens=4, ignore_eos=True, linger_seconds=60.0)
    world.cancel(stream, detach=True)
    [entry] = ask(world).requests
    assert (entry.state, entry.is_detached, entry.seconds_left) == (RequestState.WAITING, True, 60.0)
    world.run()
    [entry] = ask(world).requests
    assert (entry.state, entry.is_detached, entry.prompt_tokens, entry.output_tokens) == (RequestState.KEPT, True, 2, 4)
    assert entry.seconds_left is not None and 0 < entry.seconds_left <= 60.0
    world.tick(61.0)
    assert pages(world) == [[]]


def test_requests_of_a_journal_are_listed_before_and_after_a_worker_joins() -> None:
    before = World()
    stream = before.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True, linger_seconds=60.0, max_time_seconds=50.0)
    before.steps(4)
    mark = ask(before, page_size=1).next or RequestsMark(number=1, epoch=before.core.accepted.epoch)
    tokens = len(before.streams[stream].tokens)
    after = World(before.shape, join=False)
    after.tick(100.0)
    after.restore(stream, before, age_seconds=8.0)
    [entry] = ask(after).requests
    assert (entry.state, entry.wait_reason, entry.is_detached) == (RequestState.WAITING, WaitReason.NO_WORKER, True)
    assert (entry.age_seconds, entry.prompt_tokens, entry.output_tokens, entry.max_new_tokens) == (8.0, 3, tokens, 20)
    assert entry.seconds_left == 42.0
    # Numbers begin again, so the page of the core before cannot go on.
    assert ask(after, mark).is_stale
    after.join()
    after.step()
    [entry] = ask(after).requests
    assert (entry.request_id, entry.state, entry.is_detached) == ("r1", RequestState.RUNNING, True)
