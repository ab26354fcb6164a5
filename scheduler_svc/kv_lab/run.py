"""A workload lived through one layout, on virtual steps. Owns who waits, runs and is preempted; knows no layout.

In a step: those due arrive; the queue is admitted from its head while it fits; every running sequence gets a token, and
where there is no room for it the youngest is preempted, to the head of the queue, and computed again later; those that
are complete go. After a preemption nobody is admitted until one has gone, or the same one would come and go with every
step. Memory is looked at after the tokens and before they go.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import perf_counter_ns

from scheduler_svc.kv_lab.layouts.layout import Layout
from scheduler_svc.kv_lab.settings import Settings
from scheduler_svc.kv_lab.workload import Sequence, Workload


def _longs() -> "array[int]":
    return array("q")


@dataclass(slots=True)
class Steps:
    """One entry per step, of slots and of sequences."""

    used: "array[int]" = field(default_factory=_longs)
    reserved: "array[int]" = field(default_factory=_longs)
    free: "array[int]" = field(default_factory=_longs)
    largest_hole: "array[int]" = field(default_factory=_longs)
    saved: "array[int]" = field(default_factory=_longs)
    cached: "array[int]" = field(default_factory=_longs)
    running: "array[int]" = field(default_factory=_longs)
    waiting: "array[int]" = field(default_factory=_longs)
    read_full: "array[int]" = field(default_factory=_longs)
    """Tokens whose K/V the step's attention reads, were there no window."""
    read: "array[int]" = field(default_factory=_longs)
    """And those that it reads."""


@dataclass(slots=True)
class Life:
    """What happened. Nanoseconds are measured around the calls into the layout, the clock's own cost among them."""

    steps: Steps = field(default_factory=Steps)
    last_demand: int = 0
    """The last step at whose end somebody waited, or before which every place had a sequence or one to come."""
    finished: int = 0
    rejected: int = 0
    preemptions: int = 0
    waits: "array[int]" = field(default_factory=_longs)
    """Steps between arrival and first admission, of each sequence that was admitted."""
    prefilled: int = 0
    """Tokens to compute at admissions, were nothing found."""
    hit: int = 0
    recomputed: int = 0
    """Of those computed, what had been computed before a preemption."""
    decoded: int = 0
    prepare_ns: "array[int]" = field(default_factory=_longs)
    admit_ns: "array[int]" = field(default_factory=_longs)
    grow_ns: "array[int]" = field(default_factory=_longs)


@dataclass(slots=True)
class _Job:
    sequence: Sequence
    place: int
    arrived: int
    length: int
    ran: bool = False


class _Run:
    def __init__(self, workload: Workload, layout: Layout, settings: Settings) -> None:
        self.life = Life()
        self._layout = layout
        self._workload = workload
        self._window = settings.window
        self._due = [(step, place) for place, step in enumerate(workload.arrivals)]
        heapify(self._due)
        self._lives = [0] * len(workload.places)
        self._unfinished = [0] * len(workload.places)
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._now = 0
        self._full = False
        """Somebody was preempted and nobody has ended since."""
        self._is_ending = False
        """A place has seen its last sequence."""

    def run(self) -> Life:
        while self._due or self._waiting or self._running:
            self._arrive()
            self._admit()
            done, read_full, read = self._grow()
            self._look(len(self._running) + len(done), read_full, read)
            for job in done:
                self._layout.release(job.sequence)
                self._end(job)
                self._full = False
                self.life.finished += 1
            self._now += 1
        return self.life

    def _arrive(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            _, place = heappop(self._due)
            request = self._workload.places[place][self._lives[place]]
            self._unfinished[place] = len(request)
            for sequence in request:
                job = _Job(sequence, place, self._now, sequence.prompt)
                if not self._layout.could_ever_hold(sequence.length):
                    self.life.rejected += 1
                    self._end(job)
                    continue
                before = perf_counter_ns()
                self._layout.prepare(sequence)
                self.life.prepare_ns.append(perf_counter_ns() - before)
                self._waiting.append(job)

    def _admit(self) -> None:
        life = self.life
        while self._waiting and not (self._full and self._running):
            job = self._waiting[0]
            before = perf_counter_ns()
            hit = self._layout.admit(job.sequence, job.length)
            took = perf_counter_ns() - before
            if hit is None:
                break
            life.admit_ns.append(took)
            life.prefilled += job.length
            life.hit += hit
            if job.ran:
                life.recomputed += job.length - hit
            else:
                life.waits.append(self._now - job.arrived)
            job.ran = True
            self._running.append(self._waiting.popleft())

    def _grow(self) -> tuple[list[_Job], int, int]:
        """Those that are complete; the tokens that the step's attention reads, without a window and with it."""
        grow, grow_ns, window = self._layout.grow, self.life.grow_ns, self._window
        done: list[_Job] = []
        read_full = read = at = 0
        # Those behind `at` may be preempted on the way.
        while at < len(self._running):
            job = self._running[at]
            before = perf_counter_ns()
            grown = grow(job.sequence)
            took = perf_counter_ns() - before
            if not grown:
                self._preempt()
                continue
            grow_ns.append(took)
            job.length += 1
            read_full += job.length
            read += job.length if window is None else min(job.length, window)
            if job.length == job.sequence.length:
                done.append(job)
            at += 1
        self.life.decoded += at
        if done:
            self._running = [job for job in self._running if job.length < job.sequence.length]
        return done, read_full, read

    def _preempt(self) -> None:
        """The youngest goes back to the head of the queue; it may be the one that wants to grow."""
        job = self._running.pop()
        self._layout.release(job.sequence)
        self._waiting.appendleft(job)
        self.life.preemptions += 1
        self._full = True

    def _end(self, job: _Job) -> None:
        """When all of its request have ended, the next one of its place comes."""
        self._unfinished[job.place] -= 1
        if self._unfinished[job.place]:
            return
        self._lives[job.place] += 1
        if self._lives[job.place] < len(self._workload.places[job.place]):
            heappush(self._due, (self._now + 1, job.place))
        else:
            self._is_ending = True

    def _look(self, running: int, read_full: int, read: int) -> None:
        layout, steps = self._layout, self.life.steps
        steps.used.append(layout.used)
        steps.reserved.append(layout.reserved)
        steps.free.append(layout.free)
        steps.largest_hole.append(layout.largest_hole())
        steps.saved.append(layout.saved)
        steps.cached.append(layout.cached)
        # With those that are complete: they hold their memory up to here.
        steps.running.append(running)
        steps.waiting.append(len(self._waiting))
        steps.read_full.append(read_full)
        steps.read.append(read)
        if self._waiting or not self._is_ending:
            self.life.last_demand = self._now


def live(workload: Workload, layout: Layout, settings: Settings) -> Life:
    """The whole workload, until its last sequence has ended."""
    return _Run(workload, layout, settings).run()


def fit(workload: Workload, layout: Layout) -> int:
    """How many sequences, in order and each at its full length, are in memory when the next finds no room."""
    count = 0
    for sequence in workload.in_order():
        if not layout.could_ever_hold(sequence.length):
            continue
        layout.prepare(sequence)
        if layout.admit(sequence, sequence.length) is None:
            break
        count += 1
    return count
