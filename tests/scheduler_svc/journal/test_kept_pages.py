"""Workers that outlive the core keep their confirmed pages for the next one, and no others."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.executor import Executor, Shape
from tests.scheduler_svc.journal.test_recovery import next_life, steps
from tests.simulation.lives import Caller, Lives

_PAGE, _PLANS = 4, 2


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(tmp_path / "journal", shape=Shape(num_pages=40, max_rows=6, page_size=_PAGE), num_workers=1)
    lives.begin()
    yield lives
    lives.check()
    lives.close()


def _started(lives: Lives, num_steps: int = 16, count: int = 3) -> list[Caller]:
    """Requests after so many steps."""
    callers = [lives.submit([i, *range(10)], max_new_tokens=25, seed=i) for i in range(count)]
    steps(lives, num_steps)
    return callers


def _resumed(lives: Lives) -> None:
    next_life(lives)
    lives.resume_all()
    lives.run()


def _recomputed(lives: Lives) -> list[int]:
    """Positions before the last known token that each row computed again, in this life."""
    return [known - 1 - first for known, first in lives.starts]


def test_restored_requests_recompute_less_than_a_page_and_what_was_in_flight(lives: Lives) -> None:
    callers = _started(lives, 24)
    confirmed = [len(caller.received[0]) for caller in callers]
    assert min(confirmed) >= 2 * _PAGE
    _resumed(lives)
    assert len(lives.starts) == len(callers)
    # The label of a page goes with the plan after the result that confirmed it.
    assert max(_recomputed(lives)) <= _PAGE + _PLANS
    assert all(caller.done for caller in callers)


def test_a_prompt_of_another_caller_finds_kept_pages(lives: Lives) -> None:
    lives.submit([*range(20)], max_new_tokens=2, linger=0.0)
    lives.run()
    lives.submit([7], max_new_tokens=2, linger=0.0)
    lives.run()
    _resumed(lives)
    lives.submit([*range(20)], max_new_tokens=2)
    lives.run()
    assert lives.starts == [(20, 4 * _PAGE)]


def test_pages_survive_several_deaths(lives: Lives) -> None:
    _started(lives)
    for _ in range(3):
        next_life(lives)
        lives.resume_all()
        steps(lives, 4)
    assert min(lives.pages_kept) > 0
    lives.run()


def test_a_core_without_the_journal_takes_no_page(lives: Lives) -> None:
    _started(lives)
    shutil.rmtree(lives.folder)
    next_life(lives, workers=False)
    # Its generations are soon beyond those of the dead core.
    lives.workers["w-1"] = type(lives.workers["w-0"])(Executor(lives.shape))
    for name in ("w-1", "w-1", "w-1", "w-0"):
        lives.join(name)
    assert lives.pages_kept == [0, 0, 0, 0]


def test_a_core_with_an_older_copy_of_the_journal_takes_no_page(lives: Lives, tmp_path: Path) -> None:
    _started(lives)
    older = tmp_path / "copy"
    shutil.copytree(lives.folder, older, copy_function=shutil.copy2)
    next_life(lives)
    steps(lives, 16)
    lives.kill()
    shutil.rmtree(lives.folder)
    older.rename(lives.folder)
    # It would use generations that the worker has seen, and requests continue from fewer tokens.
    lives.generations.clear()
    lives.callers.clear()
    lives.begin()
    assert lives.pages_kept == [0]


@pytest.mark.parametrize("num_run", [0, 1, 2])
def test_plans_in_flight_at_the_death_count_for_nothing(lives: Lives, num_run: int) -> None:
    """Their steps fill pages, or fail halfway; either way their results never arrive."""
    _started(lives, 14, count=2)
    worker = lives.workers["w-0"]
    while len(worker.plans) < 2:
        assert worker.results
        message = pb.WorkerToCore(result=worker.results.popleft())
        lives.turn(worker_wire.event_of(message, "w-0"))
    confirmed = dict(worker.executor.labels.by_page)
    assert worker.plans
    if num_run:
        worker.executor.fail_at({worker.executor.num_applied + num_run})
    for plan in list(worker.plans)[:num_run]:
        worker.executor.apply(plan)
    kept = dict(worker.executor.labels.by_page)
    newer = {page for page, label in kept.items() if confirmed.get(page) != label}
    # What the next plans say of pages was confirmed when they were made.
    pool = lives.core.lanes["w-0"].pool
    assert not any(pool.is_unverified(page) for page in newer)
    _resumed(lives)
    assert lives.pages_kept[0] == len(kept)


def test_a_worker_that_was_given_up_and_is_alive_has_its_pages(lives: Lives) -> None:
    callers = _started(lives, 24)
    lives.turn(ev.WorkerLost(worker="w-0", reason="silent"))
    lives.starts.clear()
    lives.join("w-0")
    lives.run()
    assert lives.pages_kept[-1] > 0
    assert max(_recomputed(lives)) <= _PAGE + _PLANS
    assert all(caller.done for caller in callers)


def test_flushed_pages_are_not_reported_after_the_next_plan(lives: Lives) -> None:
    lives.submit([*range(20)], max_new_tokens=4)
    lives.run()
    lives.turn(ev.FlushCache(frontend="f", query=1))
    assert lives.workers["w-0"].executor.labels.by_page
    lives.submit([1], max_new_tokens=1)
    lives.run()
    assert not lives.workers["w-0"].executor.labels.by_page


def test_a_worker_out_of_step_forgets_its_pages(lives: Lives) -> None:
    callers = _started(lives)
    executor = lives.workers["w-0"].executor
    before = len(executor.labels.by_page)
    executor._faults = replace(executor._faults, out_of_sync_steps=frozenset({executor.num_applied + 1}))
    steps(lives, 6)
    assert before and len(executor.labels.by_page) < before
    lives.run()
    assert all(caller.done for caller in callers)


def test_without_a_journal_no_plan_has_labels(lives: Lives) -> None:
    lives.generations.clear()
    lives.core = type(lives.core)(CoreConfig())
    lives.turn(ev.FrontendJoined(frontend="f"))
    lives.join("w-0")
    # The keeper reads the other core.
    lives.submit([*range(20)], max_new_tokens=20, linger=0.0)
    lives.run()
    assert lives.workers["w-0"].executor.labels.by_page == {}
    assert isinstance(lives.core.handle(ev.LoadQuery(frontend="f", query=1), lives.now)[0], fx.LoadReply)
