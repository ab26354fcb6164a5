"""Runs a workload through one layout, on virtual steps. Owns the queue, the batch and preemption; knows no layout.

In a step, due sequences arrive, the queue's head is admitted while it fits, every running sequence gets a token, and
complete sequences are released. If a token finds no room, the youngest sequence is preempted to the head of the queue
and recomputed later. After a preemption no sequence is admitted until one has ended, because the preempted one would
otherwise be admitted and preempted in every step. Memory is recorded after the tokens and before the releases.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import perf_counter_ns

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.memory.layouts.layout import Layout
from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import Sequence, Workload


def _longs() -> "array[int]":
    return array("q")


_COLUMNS = "used reserved free largest_hole saved cached running waiting read_full read"
STEP = np.dtype([(name, np.int64) for name in _COLUMNS.split()])
"""One step: token slots, then sequences, then tokens of K/V that attention reads without a window and with it."""


@dataclass(slots=True)
class Record:
    """What happened in a run. The times of calls into the layout include the cost of reading the clock."""

    step_numbers: "array[int]" = field(default_factory=_longs)
    """The numbers of `STEP` for each step, one step after another."""
    last_demand: int = 0
    """The last step with full demand: a sequence waited, or no client had sent its last request to its end."""
    finished: int = 0
    rejected: int = 0
    preemptions: int = 0
    waits: "array[int]" = field(default_factory=_longs)
    """Steps between arrival and first admission, for each admitted sequence."""
    prefilled: int = 0
    """Tokens of admitted sequences at their admission, cached ones included."""
    hit: int = 0
    recomputed: int = 0
    """Tokens computed a second time, because of a preemption."""
    decoded: int = 0
    prepare_ns: "array[int]" = field(default_factory=_longs)
    admit_ns: "array[int]" = field(default_factory=_longs)
    grow_ns: "array[int]" = field(default_factory=_longs)

    @property
    def steps(self) -> npt.NDArray[np.void]:
        """One `STEP` per step."""
        return np.frombuffer(self.step_numbers, STEP)


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    client: int
    arrived: int
    length: int
    ran: bool = False


class _Run:
    def __init__(self, workload: Workload, layout: Layout, settings: Settings) -> None:
        self.record = Record()
        self._layout = layout
        self._workload = workload
        self._window = settings.window
        self._due = [(step, client) for client, step in enumerate(workload.arrivals)]
        heapify(self._due)
        self._requests_ended = [0] * len(workload.clients)
        self._unfinished = [0] * len(workload.clients)
        self._waiting: deque[_Entry] = deque()
        self._running: list[_Entry] = []
        self._now = 0
        self._full = False
        """A sequence was preempted and none has ended since."""
        self._is_ending = False
        """A client's last request has ended."""

    def run(self) -> Record:
        while self._due or self._waiting or self._running:
            self._arrive()
            self._admit()
            done, read_full, read = self._grow()
            self._observe(len(self._running) + len(done), read_full, read)
            for entry in done:
                self._layout.release(entry.sequence)
                self._end(entry)
                self._full = False
                self.record.finished += 1
            self._now += 1
        return self.record

    def _arrive(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            _, client = heappop(self._due)
            request = self._workload.clients[client][self._requests_ended[client]]
            self._unfinished[client] = len(request)
            for sequence in request:
                entry = _Entry(sequence, client, self._now, sequence.prompt)
                if not self._layout.could_ever_hold(sequence.length):
                    self.record.rejected += 1
                    self._end(entry)
                    continue
                before = perf_counter_ns()
                self._layout.prepare(sequence)
                self.record.prepare_ns.append(perf_counter_ns() - before)
                self._waiting.append(entry)

    def _admit(self) -> None:
        record = self.record
        while self._waiting and not (self._full and self._running):
            entry = self._waiting[0]
            before = perf_counter_ns()
            hit = self._layout.admit(entry.sequence, entry.length)
            took = perf_counter_ns() - before
            if hit is None:
                break
            record.admit_ns.append(took)
            record.prefilled += entry.length
            record.hit += hit
            if entry.ran:
                record.recomputed += entry.length - hit
            else:
                record.waits.append(self._now - entry.arrived)
            entry.ran = True
            self._running.append(self._waiting.popleft())

    def _grow(self) -> tuple[list[_Entry], int, int]:
        """Returns the complete sequences, and the tokens that attention reads without a window and with it."""
        grow, grow_ns, window = self._layout.grow, self.record.grow_ns, self._window
        done: list[_Entry] = []
        read_full = read = at = 0
        # The sequences behind `at` may be preempted in the loop.
        while at < len(self._running):
            entry = self._running[at]
            before = perf_counter_ns()
            grown = grow(entry.sequence)
            took = perf_counter_ns() - before
            if not grown:
                self._preempt()
                continue
            grow_ns.append(took)
            entry.length += 1
            read_full += entry.length
            read += entry.length if window is None else min(entry.length, window)
            if entry.length == entry.sequence.length:
                done.append(entry)
            at += 1
        self.record.decoded += at
        if done:
            self._running = [entry for entry in self._running if entry.length < entry.sequence.length]
        return done, read_full, read

    def _preempt(self) -> None:
        """Moves the youngest sequence to the head of the queue. It may be the one that needs the token."""
        entry = self._running.pop()
        self._layout.release(entry.sequence)
        self._waiting.appendleft(entry)
        self.record.preemptions += 1
        self._full = True

    def _end(self, entry: _Entry) -> None:
        """Ends a sequence. When its request is complete, the client sends its next one."""
        self._unfinished[entry.client] -= 1
        if self._unfinished[entry.client]:
            return
        self._requests_ended[entry.client] += 1
        if self._requests_ended[entry.client] < len(self._workload.clients[entry.client]):
            heappush(self._due, (self._now + 1, entry.client))
        else:
            self._is_ending = True

    def _observe(self, running: int, read_full: int, read: int) -> None:
        layout = self._layout
        slots = (layout.used, layout.reserved, layout.free, layout.largest_hole(), layout.saved, layout.cached)
        # `running` includes complete sequences, because they still hold their memory.
        self.record.step_numbers.extend((*slots, running, len(self._waiting), read_full, read))
        if self._waiting or not self._is_ending:
            self.record.last_demand = self._now


def run_workload(workload: Workload, layout: Layout, settings: Settings) -> Record:
    """Runs the whole workload, until its last sequence has ended."""
    return _Run(workload, layout, settings).run()


def count_that_fit(workload: Workload, layout: Layout) -> int:
    """Admits sequences at their full lengths, in order, and returns how many there are before one finds no room."""
    count = 0
    for sequence in workload.in_order():
        if not layout.could_ever_hold(sequence.length):
            continue
        layout.prepare(sequence)
        if layout.admit(sequence, sequence.length) is None:
            break
        count += 1
    return count
