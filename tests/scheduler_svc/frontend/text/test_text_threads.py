"""Threads for long texts: the tenant that has used the least time is next, and what waits is bounded."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from scheduler_svc.frontend.rpc.status import Refusal
from scheduler_svc.frontend.text import tokenizer
from scheduler_svc.frontend.text.tokenizer import TextThreads
from tests.rigs.processes import no_threads


@pytest.fixture
def held() -> threading.Event:
    """The work of the threads waits for it."""
    return threading.Event()


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[TextThreads]:
    """One thread; the places of those that wait are a parameter."""
    made = TextThreads(1, getattr(request, "param", 100))
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """CPU seconds of all threads, which only the tests' work advances."""
    now = [0.0]
    monkeypatch.setattr(tokenizer, "thread_time", lambda: now[0])
    return now


async def test_a_tenant_with_expensive_texts_delays_another_by_what_runs(
    threads: TextThreads, held: threading.Event, clock: list[float]
) -> None:
    order: list[str] = []

    def work(tenant: str, seconds: float) -> Callable[[], str]:
        def done() -> str:
            held.wait()
            clock[0] += seconds
            order.append(tenant)
            return tenant

        return done

    greedy = [asyncio.create_task(threads.run("a", work("a", 3.0))) for _ in range(6)]
    await asyncio.sleep(0)
    polite = [asyncio.create_task(threads.run("b", work("b", 1.0))) for _ in range(5)]
    await asyncio.sleep(0)
    held.set()
    assert await asyncio.gather(*greedy, *polite) == ["a"] * 6 + ["b"] * 5
    # Both begin equal; then three of one second for one of three.
    assert "".join(order) == "abbbabbaaaa"
    assert threads.gate.used == {"a": 18.0, "b": 5.0}
    # A latecomer has no credit for idle time: it starts where the others are.
    await threads.run("c", work("c", 1.0))
    assert threads.gate.used["c"] == 16.0


@pytest.mark.parametrize("threads", [4], indirect=True)
async def test_what_waits_is_bounded_and_leaves_room_for_another(threads: TextThreads, held: threading.Event) -> None:
    running = [asyncio.create_task(threads.run("a", held.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="2 long texts of the caller wait; the limit is 2"):
        await threads.run("a", held.wait)
    running.append(asyncio.create_task(threads.run("b", held.wait)))
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="1 long text of the caller waits; the limit is 1"):
        await threads.run("b", held.wait)
    held.set()
    assert await asyncio.gather(*running) == [True] * 4


async def test_a_cancelled_caller_takes_no_thread_and_errors_reach_it(
    threads: TextThreads, held: threading.Event
) -> None:
    ran = list[int]()
    first = asyncio.create_task(threads.run("", held.wait))
    await asyncio.sleep(0)
    gone = asyncio.create_task(threads.run("", lambda: ran.append(1)))
    wrong = asyncio.create_task(threads.run("", lambda: 1 // 0))
    last = asyncio.create_task(threads.run("", lambda: ran.append(2)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0)
    held.set()
    found = await asyncio.gather(first, gone, wrong, last, return_exceptions=True)
    assert [type(each) for each in found] == [bool, asyncio.CancelledError, ZeroDivisionError, type(None)]
    assert ran == [2]


@pytest.mark.parametrize("runs_first", [True, False])
async def test_what_waits_at_the_close_and_what_comes_later_is_refused(
    threads: TextThreads, held: threading.Event, runs_first: bool
) -> None:
    """A text in several pieces asks for a thread again after the model has gone."""
    tasks = [asyncio.create_task(threads.run("", held.wait)) for _ in range(2 * runs_first)]
    await asyncio.sleep(0)
    threads.close()
    tasks.append(asyncio.create_task(threads.run("", held.wait)))
    await asyncio.sleep(0)
    held.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert found[:runs_first] == [True] * runs_first
    codes = [each.code for each in found[runs_first:] if isinstance(each, Refusal)]
    assert codes == [grpc.StatusCode.UNAVAILABLE] * (1 + runs_first)


async def test_what_fails_counts_for_its_tenant_and_so_does_what_nobody_waits_for(
    threads: TextThreads, held: threading.Event, clock: list[float]
) -> None:
    def fail() -> None:
        held.wait()
        clock[0] += 2.0
        raise ValueError

    tasks = [asyncio.create_task(threads.run("a", fail)) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    # Its thread is not free before the work has ended.
    assert (threads.gate.inside.of("a"), threads.gate.waiting.of("a")) == (1, 1)
    held.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in found] == [asyncio.CancelledError, ValueError]
    assert threads.gate.used == {"a": 4.0}


async def test_the_time_is_that_of_the_thread(threads: TextThreads) -> None:
    def work() -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    await threads.run("a", work)
    await threads.run("b", lambda: time.sleep(0.05))
    assert threads.gate.used["a"] >= 0.02
    assert threads.gate.used["b"] < 0.02


async def test_a_text_for_which_no_thread_can_be_started_leaves_its_place(threads: TextThreads) -> None:
    with no_threads(), pytest.raises(Refusal, match="a long text needs a thread: can't start new thread"):
        await threads.run("a", lambda: 1)
    assert await threads.run("a", lambda: 2) == 2
