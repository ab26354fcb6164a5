"""Constraints that take too long, and servers that end or hang: what fails is what is at fault, and nothing else."""

import os
import re
import signal

import numpy as np
import pytest

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.frames import Frame, Kind
from gpu_worker.constraints.rows import ConstrainedRow, Fate
from gpu_worker.constraints.watch import Limits
from tests.gpu_worker.constraints.rig import (
    ALL,
    CHOICE,
    OBJECT,
    SLOW_AT_ONCE,
    SLOW_LATER,
    WORD,
    Walk,
    hash_of,
    masks_of,
    prepare,
    serving,
    serving_process,
)

_A = 66
# What was measured, and the limit.
EXCESS = r"took \d+ ms of CPU time; the limit is \d+ ms of CPU time \({} x [1-4][.\d]*, for the speed of this machine\)"
# Compiles in a millisecond; its first mask takes minutes.
ENDLESS = "start:" + " a" * 20 + "\na: /x{30000}/"
NO_TOKENS = np.zeros(0, np.int32)


def is_computed(constraints: Constraints, own: ConstrainedRow) -> bool:
    """Whether the server computes for the row."""
    supervisor = constraints._supervisor
    return supervisor._culprit_of(supervisor._watch.work) is own


@pytest.mark.parametrize("place", [1, 4])
def test_a_mask_over_the_limit_fails_its_row_alone(place: int) -> None:
    """It names the limit and the output token; rows before and after it in the request go on with right masks."""
    with serving(Limits(mask=0.03)) as constraints:
        assert set(prepare(constraints, *ALL, SLOW_LATER).values()) == {""}
        walk = Walk(constraints=constraints, sources=ALL, seed=3)
        walk.run(2)
        constraints.start(7, hash_of(SLOW_LATER), NO_TOKENS)
        slow = constraints.row(7)
        masks_of(constraints, slow)
        assert slow.fate is Fate.OPEN
        rows = walk.open_rows
        rows.insert(place, slow)
        constraints.learn([(slow, _A)])
        masks_of(constraints, *rows)
        assert slow.fate is Fate.FAILED
        assert re.fullmatch(f"the constraint {EXCESS.format('30 ms')}, at output token 2", slow.detail)
        walk.run(100)
        assert not walk.failed


def test_a_constraint_over_the_limit_is_refused_and_others_go_on() -> None:
    with serving(Limits(prepare=0.1)) as constraints:
        prepare(constraints, *ALL)
        walk = Walk(constraints=constraints, sources=ALL, seed=6)
        walk.run(3)
        constraints.prepare(hash_of(SLOW_AT_ONCE), SLOW_AT_ONCE.encode())
        constraints.prepare(hash_of("start: /z/"), b"start: /z/")
        found: dict[bytes, str] = {}
        while len(found) < 2:
            walk.run(1)
            found |= dict(constraints.answers())
        assert found.pop(hash_of("start: /z/")) == ""
        [refusal] = found.values()
        assert re.fullmatch(f"preparing the constraint {EXCESS.format('100 ms')}", refusal)
        walk.run(100)
        assert not walk.failed


def test_masks_are_computed_while_a_constraint_is_prepared() -> None:
    """One that takes minutes."""
    with serving(Limits(prepare=1e9)) as constraints:
        prepare(constraints, WORD)
        walk = Walk(constraints=constraints, sources=[WORD])
        constraints.prepare(hash_of(ENDLESS), ENDLESS.encode())
        while not constraints._supervisor._watch.prepared:
            assert constraints.answers() == []
        walk.run(100)
        assert not walk.open_rows and constraints.answers() == [] and constraints.is_preparing


def test_a_server_that_ends_twice_in_a_row_fails_this_row() -> None:
    """Killed from outside while it computes the mask of one row, as if the mask ended it."""
    with serving(Limits(mask=30.0)) as constraints:
        prepare(constraints, OBJECT, SLOW_LATER)
        walk = Walk(constraints=constraints, sources=[OBJECT], seed=8)
        constraints.start(5, hash_of(SLOW_LATER), np.array([_A], np.int32))
        bad = constraints.row(5)
        for num in (1, 2):
            while not is_computed(constraints, bad):
                constraints.are_masked([bad])
            os.kill(serving_process(constraints), signal.SIGKILL)
            while is_computed(constraints, bad) and bad.fate is Fate.OPEN:
                constraints.are_masked([bad])
            assert (bad.fate is Fate.FAILED) == (num == 2)
        # Token 1 if the second kill came while the server still took it.
        assert bad.detail in [f"the constraint ended its process twice, at output token {num}" for num in (1, 2)]
        walk.run(60)
        assert constraints.row(1).fate is not Fate.FAILED


class StoppedClock:
    """The worker's clock goes on while it waits for a server that is stopped, and at no other time."""

    def __init__(self, constraints: Constraints) -> None:
        self._watch = constraints._supervisor._watch
        self.now, self.stopped = 0.0, -1
        self._watch._clock = self

    def __call__(self) -> float:
        if self._watch._process == self.stopped:
            self.now += 0.05
        return self.now


def test_a_server_that_is_stopped_is_replaced_without_blame() -> None:
    with serving(Limits(idle=0.3, patience=1.0)) as constraints:
        clock = StoppedClock(constraints)
        prepare(constraints, *ALL)
        walk = Walk(constraints=constraints, sources=ALL, seed=2)
        for _ in range(3):
            # Perhaps in the middle of a mask.
            walk.run(1)
            clock.stopped = serving_process(constraints)
            os.kill(clock.stopped, signal.SIGSTOP)
        walk.run(100)
        assert not walk.failed
        assert serving_process(constraints) != clock.stopped


def test_servers_whose_answers_are_too_short_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as constraints:
        prepare(constraints, CHOICE)
        server, num_short = constraints._supervisor._server, 0
        receive = server.receive

        def short() -> list[Frame]:
            nonlocal num_short
            frames = [
                frame if frame.kind is not Kind.MASKED else Frame(frame.kind, frame.number) for frame in receive()
            ]
            num_short += sum(frame.kind is Kind.MASKED for frame in frames)
            assert num_short < 10, "another server is started again and again"
            return frames

        monkeypatch.setattr(server, "receive", short)
        constraints.start(1, hash_of(CHOICE), NO_TOKENS)
        row = constraints.row(1)
        masks_of(constraints, row)
        # The server may or may not have said by then that it computes nothing.
        words = ("ended its process twice", "ended 6 times in a row: MASKED has 0 bytes; 1 row needs 1")
        assert row.fate is Fate.FAILED and any(word in row.detail for word in words)


def test_servers_that_cannot_start_end_every_constraint_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as constraints:
        monkeypatch.setattr("sys.executable", "/bin/false")
        answers = prepare(constraints, CHOICE)
        assert "mask server" in answers[CHOICE]
        monkeypatch.undo()
        assert prepare(constraints, CHOICE) == {CHOICE: ""}
