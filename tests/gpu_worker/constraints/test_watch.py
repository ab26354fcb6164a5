"""What the worker sees of the mask server between any two of its instructions is what the server does or did."""

import os
import socket
import struct
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from gpu_worker.constraints import frames, server
from gpu_worker.constraints.frames import (
    MAX_ENTRIES,
    MAX_NUMBER,
    PREPARED,
    WORK,
    Frame,
    Kind,
    SharedArea,
    Stage,
    Work,
    advance,
    new_memory,
    work_word,
)
from gpu_worker.constraints.matchers import MatcherError
from gpu_worker.constraints.server import MaskServer
from gpu_worker.constraints.watch import Excess, Limits, Watch, cpu_seconds
from tandem_contract import grammars
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

    def row(self, row: int, start: int, constraint: int) -> SimpleNamespace:
        return SimpleNamespace(num_tokens=0)

    def take(self, own: SimpleNamespace, tokens: list[int]) -> None:
        own.num_tokens += len(tokens)


class Looks:
    """A watch over memory that the test writes, with a clock and a CPU clock that go on at a word of the test."""

    def __init__(self, limits: Limits, slowness: float = 1.0) -> None:
        memory = new_memory(SIZES)
        self.area = SharedArea(memory, SIZES)
        os.close(memory)
        self.now = self.cpu = 0.0
        self.watch = Watch(self.area, limits, lambda: self.now, lambda process, thread: self.cpu)
        self.watch.begin(os.getpid(), 1, slowness)

    def until(self, what: str, *, wall: float, cpu: float, most: int = 10_000) -> tuple[int, Excess] | None:
        """Looks until `work` or `preparation` is overdue. Returns (number of looks, excess)."""
        self.area.progress[WORK], self.area.progress[PREPARED] = work_word(Stage.MASK, 3, 1, 9), 4
        for num in range(most):
            found = self.watch.overdue_work() if what == "work" else self.watch.overdue_preparation()
            if found is not None:
                assert found[0] == (Work(Stage.MASK, 3, 1, 9) if what == "work" else 4)
                return num, found[1]
            self.now, self.cpu = self.now + wall, self.cpu + cpu
        return None


class Bench(Looks):
    """A server that writes the same memory."""

    def __init__(self, limits: Limits, num_constraints: int = 1_000) -> None:
        super().__init__(limits)
        # No row is refused because no token may come.
        self.area.masks[:] = -1
        self.worker, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server = MaskServer(self._other, self.area, FakeMatchers(num_constraints))  # type: ignore[arg-type]
        self.seen = Counter[object]()

    def close(self) -> None:
        self.worker.close()
        self._other.close()


def test_no_constraint_is_blamed_for_the_time_of_the_one_before_it() -> None:
    bench = Bench(Limits(prepare=2.0), num_constraints=3)
    for number in (7, 8, 9):
        bench.server._wanted.put(Frame(Kind.PREPARE, number, b"bad" if number == 8 else b"good"))

    def look() -> None:
        # The CPU time of what is seen for the second time is known at the third look.
        bench.now, bench.cpu = bench.now + 0.04, bench.cpu + 1.5
        bench.seen[prepared := bench.watch.prepared] += 1
        late = bench.watch.overdue_preparation()
        assert late is None or (late[0] == prepared and bench.seen[prepared] > 3)

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
        bench.now, bench.cpu = bench.now + 0.04, bench.cpu + 1.0
        if not found or bench.watch.work != found[-1]:
            found.append(bench.watch.work)
            bench.seen.clear()
        bench.seen[found[-1]] += 1
        late = bench.watch.overdue_work()
        assert late is None or (late[0] == found[-1] and bench.seen[found[-1]] > 2)

    assert at_every_instruction(bench.server.serve, look, server, frames) > 200
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


@pytest.mark.parametrize("what", ["work", "preparation"])
@pytest.mark.parametrize("slowness", [1.0, 2.5])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_a_limit_counts_the_cpu_time_of_its_thread(what: str, slowness: float, share: float) -> None:
    """However small its share of a CPU is, and more of it on a slower machine."""
    looks = Looks(Limits(mask=0.25, prepare=2.0), slowness)
    found = looks.until(what, wall=0.02, cpu=0.02 * share)
    assert found is not None and found[1].is_of_cpu
    limit = (0.25 if what == "work" else 2.0) * slowness
    # The first slices are not counted.
    assert limit < found[1].cpu <= limit + 0.021 and looks.cpu <= limit + 0.061


@pytest.mark.parametrize("what", ["work", "preparation"])
def test_a_thread_that_sleeps_exceeds_a_limit_of_wall_time_only_while_somebody_waits(what: str) -> None:
    looks = Looks(Limits(mask=0.25, prepare=0.25, patience=10.0))
    # A pause of the worker counts as one look.
    assert looks.until(what, wall=100.0, cpu=0.001, most=49) is None
    found = looks.until(what, wall=0.02, cpu=0.001)
    assert found is not None and not found[1].is_of_cpu and found[1].wall == pytest.approx(2.5, abs=0.06)


@pytest.mark.parametrize(
    ("excess", "words"),
    [
        (
            Excess(cpu=0.3174, wall=1.0, limit=0.25, slowness=1.0),
            "took 317 ms of CPU time; the limit is 250 ms of CPU time (250 ms x 1, for the speed of this machine)",
        ),
        (
            Excess(cpu=5.017, wall=6.0, limit=2.0, slowness=2.5),
            "took 5.02 s of CPU time; the limit is 5 s of CPU time (2 s x 2.5, for the speed of this machine)",
        ),
        (
            Excess(cpu=0.04, wall=2.51, limit=0.25, slowness=1.0),
            "took 40 ms of CPU time in 2.51 s and was not done, because the machine is busy; the limit is 250 ms of "
            "CPU time (250 ms x 1, for the speed of this machine)",
        ),
    ],
)
def test_a_refusal_tells_what_was_measured_and_the_limit(excess: Excess, words: str) -> None:
    assert excess.words == words


def test_the_speed_of_a_machine_is_bounded() -> None:
    ratios = {0.2: 1.0, 1.0: 1.0, 1.266: 1.27, 3.999: 4.0, 70.0: 4.0}
    assert {ratio: grammars.bounded(ratio) for ratio in ratios} == ratios
    assert grammars.LEAST <= grammars.slowness() <= grammars.MOST


def test_the_cpu_clock_is_that_of_one_thread() -> None:
    """Another one computes beside it."""
    begun, done = threading.Event(), threading.Event()

    def compute() -> None:
        while not done.is_set():
            begun.set()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        begun.wait()
        own, other = threading.get_native_id(), thread.native_id or 0
        before = cpu_seconds(os.getpid(), own)
        start = cpu_seconds(os.getpid(), other)
        while cpu_seconds(os.getpid(), other) < start + 0.1:
            done.wait(0.01)
        assert cpu_seconds(os.getpid(), own) < before + 0.1
    finally:
        done.set()
        thread.join()
    assert cpu_seconds(os.getpid(), 1) == 0.0
