"""200,000 operations of fixed seeds; `python -m tests.simulation 200 --seeds 800` goes on where they end."""

import os
from collections import Counter

import pytest

from tests.simulation.lives import lives

# What the lives must meet, or a proof of it would be empty. Few of a kind would be luck.
_MUST_BE_SEEN = (
    "page shared", "page shared in the step that writes it", "own page found again", "page copied", "page saved",
    "page loaded", "host page used again", "page zeroed", "page flushed", "started behind a window",
    "several lanes at work", "end with cached prompt", "end after a preemption",
    "end after another worker took over", "end: eos", "end: stop token", "end: stop string", "end: length",
    "end: context full", "end: time limit", "end: aborted", "end: deadline", "end: internal", "end: no worker",
    "end: shutdown", "reset: step failed", "reset: out of memory", "reset: out of sync", "reset: worker lost",
    "reset: worker silent", "reset: wrong step", "reset: malformed result", "reset: skipped",
    "worker proven", "queue full",
)  # fmt: skip
_FEW = 3


@pytest.mark.timeout(400)
def test_random_lives_keep_every_promise_and_meet_everything() -> None:
    """On all CPUs. A life that fails says how to repeat it alone."""
    seen = Counter[str]()
    with lives(range(200), 1000, os.cpu_count() or 1) as living:
        for life in living:
            assert not life.failure, life.failure
            seen += life.seen
    rare = {what: seen[what] for what in _MUST_BE_SEEN if seen[what] < _FEW}
    assert not rare, f"the lives hardly meet {rare}"


def test_lives_in_several_processes_are_those_in_one() -> None:
    told = []
    for jobs in (1, 2):
        with lives(range(3), 100, jobs) as living:
            told.append(list(living))
    assert told[0] == told[1] and [life.seed for life in told[0]] == [0, 1, 2]
    assert all(life.num_handled >= 100 and not life.failure for life in told[0])


def test_a_seed_that_fails_says_how_to_live_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.episode.audit", lambda core: 1 / 0)
    with lives([7], 100, 1) as living:
        [life] = living
    assert "again: python -m tests.simulation 7 --operations 100" in life.failure
    assert "ZeroDivisionError" in life.failure and life.num_handled == 1
