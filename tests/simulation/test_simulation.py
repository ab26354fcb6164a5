"""20,000 operations of fixed seeds, 200,000 as a long test; `python -m tests.simulation 200 --seeds 800` goes on."""

import os
from collections import Counter

import pytest

from tests.simulation.runs import runs

# Every event that the runs must contain often enough, because a check that never runs proves nothing.
_MUST_BE_SEEN = (
    "page shared", "own page found again", "page copied", "page saved", "page loaded", "host page reused",
    "page zeroed", "page flushed", "started past a window", "several lanes at work", "end with cached prompt",
    "end after a preemption", "end after a worker change", "end: eos", "end: stop token", "end: stop string",
    "end: length", "end: context full", "end: constraint complete", "constraint answered", "row awaits a resource",
    "constraint dropped", "adapter answered", "adapter dropped", "started with an adapter", "adapter refused",
    "end: time limit", "end: aborted", "end: deadline", "end: internal", "end: no worker", "reset: step failed",
    "reset: out of memory", "reset: out of sync", "reset: worker lost", "reset: worker silent", "reset: wrong step",
    "worker proven", "worker poisoned", "standby seated", "queue full", "detached", "resumed", "not resumed",
    "replaced", "core died", "core died before it sent", "core died without a journal",
    "resumed after the core's death", "reader lost", "suspects", "restored suspects", "page labelled", "pages kept",
    "pages kept over a death", "plan of a dead core was run", "worker hangs", "worker killed", "memory: smaller step",
    "memory: fewer rows", "token file", "weights loaded", "update: done", "update between deaths",
    "not serving: worker lost", "waits: worker lost", "waits: queue",
)  # fmt: skip
# Also of many runs. Tests of the core show each of them.
_RARE = (
    "page shared in the step that writes it", "reset: malformed result", "reset: skipped",
    "plan of a dead core failed", "lost frame noticed", "weights refused", "update: refused", "update: time limit",
    "output of several versions", "waits: suspect", "end: shutdown",
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_seeds", "events", "few", "jobs"),
    [
        # Other tests of this suite run beside it.
        (20, _MUST_BE_SEEN, 1, 1),
        pytest.param(200, (*_MUST_BE_SEEN, *_RARE), 3, os.cpu_count() or 1, marks=pytest.mark.long),
    ],
)
def test_random_runs_pass_every_check_and_contain_every_event(
    num_seeds: int, events: tuple[str, ...], few: int, jobs: int
) -> None:
    """A failure names the command that replays its seed alone."""
    seen = Counter[str]()
    with runs(range(num_seeds), 1000, jobs) as results:
        for run in results:
            assert not run.failure, run.failure
            seen += run.seen
    rare = {event: seen[event] for event in events if seen[event] < few}
    assert not rare, f"the runs contain too few of {rare}"


def test_seeds_run_in_several_processes_give_the_results_of_one_process() -> None:
    by_jobs = []
    for jobs in (1, 2):
        with runs(range(2), 100, jobs) as results:
            by_jobs.append(list(results))
    assert by_jobs[0] == by_jobs[1] and [run.seed for run in by_jobs[0]] == [0, 1]
    assert all(run.num_handled >= 100 and not run.failure for run in by_jobs[0])


def test_a_failing_seed_prints_its_replay_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.episode.audit", lambda core: 1 / 0)
    with runs([7], 100, 1) as results:
        [run] = results
    assert "replay: python -m tests.simulation 7 --operations 100" in run.failure
    assert "ZeroDivisionError" in run.failure and run.num_handled == 1
