"""What the worker sees of the mask server between any two of its instructions is what the server does or did."""

import os
import socket
import struct
from collections import Counter

import pytest

from gpu_worker.constraints import area, server
from gpu_worker.constraints.area import MAX_ENTRIES, MAX_NUMBER, SharedArea, Stage, Work, new_memory, work_word
from gpu_worker.constraints.frames import Frame, Kind, advance
from gpu_worker.constraints.limits import Limits
from gpu_worker.constraints.matchers import MatcherError
from gpu_worker.constraints.server import MaskServer
from gpu_worker.constraints.watch import Watch
from tests.gpu_worker.constraints.rig import SIZES
from tests.rigs.instructions import at_every_instruction


class FakeMatchers:
    """Takes no time; `compiled` ends the thread that prepares after `num_constraints`."""

    def __init__(self, num_constraints: int = 1_000) -> None:
        self._num_left = num_constraints

    def compiled(self, source: bytes) -> object:
        self._num_left -= 1
        if self._num_left < 0:
            raise EOFError
        if source == b"bad":
            raise MatcherError("bad")
        return source

    def define(self, *_: object) -> None:
        pass

    drop = is_complete = fill = define

    def row(self, row: int, start: int, constraint: int) -> "FakeRow":
        return FakeRow()

    def take(self, own: "FakeRow", tokens: list[int]) -> None:
        own.num_tokens += len(tokens)


class FakeRow:
    num_tokens = 0


class Bench:
    """A server and a watch over the same memory. The watch's clock goes on at a word of the test."""

    def __init__(self, limits: Limits, num_constraints: int = 1_000) -> None:
        memory = new_memory(SIZES)
        self.area = SharedArea(memory, SIZES)
        os.close(memory)
        # No row is refused because no token may come.
        self.area.masks[:] = -1
        self.worker, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server = MaskServer(other, self.area, FakeMatchers(num_constraints))  # type: ignore[arg-type]
        self._other = other
        self.now = 0.0
        self.watch = Watch(self.area, limits, lambda: self.now)
        self.watch.begin(os.getpid())
        self.seen = Counter[object]()

    def close(self) -> None:
        self.worker.close()
        self._other.close()


def test_no_constraint_is_blamed_for_the_time_of_the_one_before_it() -> None:
    bench = Bench(Limits(prepare=2.0), num_constraints=3)
    for number in (7, 8, 9):
        bench.server._wanted.put(Frame(Kind.PREPARE, number, b"bad" if number == 8 else b"good"))

    def look() -> None:
        # 1.5 s since the last look: a constraint that is seen twice was there for 1.5 s, one that is seen thrice for 3.
        bench.now += 1.5
        bench.seen[prepared := bench.watch.prepared] += 1
        if bench.seen[prepared] <= 2:
            assert bench.watch.overdue_preparation() == 0
        else:
            assert bench.watch.overdue_preparation() in (0, prepared)

    bench.server._wanted.put(Frame(Kind.PREPARE, 10))

    def prepare() -> None:
        with pytest.raises(EOFError):
            bench.server._prepare()

    assert at_every_instruction(prepare, look, server) > 50
    assert set(bench.seen) == {0, 7, 8, 9, 10}
    bench.close()


def test_no_work_is_blamed_for_the_time_of_the_one_before_it() -> None:
    """Each limit is shorter than what was seen before, so time that is taken over is a failure."""
    bench = Bench(Limits(mask=0.05, define=0.5, idle=5.0))
    for frame in (
        Frame(Kind.DEFINE, 5, b"good"),
        advance(1, [(1, 1, 5, 0), (2, 2, 5, 3)]),
        Frame(Kind.DROP, 5),
        advance(2, [(2, 2, 5, 100)]),
        Frame(Kind.DEFINE, 6, b"bad"),
    ):
        bench.worker.send(frame.encoded())
    bench.worker.shutdown(socket.SHUT_WR)
    found = list[Work]()

    def look() -> None:
        bench.now += 0.04
        is_first = not found or bench.watch.work != found[-1]
        if is_first:
            found.append(bench.watch.work)
        late = bench.watch.overdue_work()
        assert late is None or (late == found[-1] and not is_first)

    assert at_every_instruction(bench.server.serve, look, server, area) > 200
    rows = [(Stage.TAKE, 1, 0, 0), (Stage.TAKE, 1, 1, 3), (Stage.MASK, 1, 0, 1), (Stage.MASK, 1, 1, 4)]
    pieces = [(Stage.TAKE, 2, 0, 100), (Stage.TAKE, 2, 0, 65), (Stage.MASK, 2, 0, 101)]
    names = [(each.stage, each.number, each.entry, each.token) for each in found]
    assert names == [
        (Stage.IDLE, 0, 0, 0),
        (Stage.DEFINE, 5, 0, 0),
        (Stage.IDLE, 5, 0, 0),
        *rows,
        (Stage.IDLE, 1, 0, 0),
        (Stage.IDLE, 5, 0, 0),
        *pieces,
        (Stage.IDLE, 2, 0, 0),
        (Stage.DEFINE, 6, 0, 0),
        (Stage.IDLE, 6, 0, 0),
    ]
    bench.close()


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("number", [0, 1, MAX_NUMBER])
@pytest.mark.parametrize("entry", [0, MAX_ENTRIES - 1])
@pytest.mark.parametrize(("token", "shown"), [(0, 0), (64, 64), (1_048_575, 1_048_575), (9_999_999, 1_048_575)])
def test_a_word_holds_every_number_of_its_parts(stage: Stage, number: int, entry: int, token: int, shown: int) -> None:
    word = work_word(stage, number, entry, token)
    assert Work.of(word) == Work(stage, number, entry, shown)
    assert len(struct.pack("<Q", word)) == 8
