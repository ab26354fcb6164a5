"""One service of a simulation: a core, its workers, and the time that the core takes.

Owns the events that wait for the core. A core that takes time (`Setup.core_seconds`) handles one event after the other,
and what it sends leaves when it has handled the event.

**Front ends** as far as they take time: a request and a message each cost CPU of one process. As in the service, first
tokens and ends leave first; above `BUSY_TOKENS` per second the other tokens of a stream wait for `MERGE_SECONDS`, so
that one message carries several. A front end that cannot keep up sends later, and so more tokens in a message.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import Load, StepReport
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import SLOT_BITS, SLOT_MASK, Setup, SimulatedWorker

# Those of the service (scheduler_svc/frontend/streaming/stream.py).
BUSY_TOKENS, MERGE_SECONDS = 5000.0, 0.015
_WINDOW_SECONDS = 0.1
# Streams that get their messages before new ones are looked at.
_TURN = 16


@dataclass(slots=True)
class _Waiting:
    """Tokens of one stream that have not been sent. Times are on the simulation's clock, in seconds."""

    due: float
    # When the oldest of them came from the core.
    since: float
    is_first: bool
    has_tokens: bool = True
    end: fx.End | None = None


class FrontEnd:
    """One process."""

    def __init__(self, setup: Setup, tally: Tally) -> None:
        self.busy_seconds = 0.0
        self.messages = 0
        self.tokens = 0
        self._setup, self._tally = setup, tally
        self._free_at = 0.0
        # By slot. Each is in one of the two lines, in order of due times; one that moves leaves a stale entry behind.
        self._waiting: dict[int, _Waiting] = {}
        self._urgent: deque[tuple[int, _Waiting]] = deque()
        self._merging: deque[tuple[int, _Waiting]] = deque()
        self._num_ends = 0
        self._window_from, self._window_tokens, self._is_busy = 0.0, 0, False

    def admit(self, now: float) -> float:
        """Takes a request that arrives. Returns when the core gets it."""
        self.advance(now)
        self._take_time(max(now, self._free_at), self._setup.request_seconds)
        return self._free_at

    def take(self, slots: list[int], firsts: list[bool], ends: list[fx.End], now: float) -> None:
        """Takes the tokens and ends of a step."""
        self.advance(now)
        self._count(len(slots), now)
        for slot, is_first in zip(slots, firsts, strict=True):
            if slot in self._waiting and not is_first:
                continue
            urgent = is_first or not self._is_busy
            made = self._waiting[slot] = _Waiting(now if urgent else now + MERGE_SECONDS, now, is_first=is_first)
            (self._urgent if urgent else self._merging).append((slot, made))
        for end in ends:
            slot = end.stream & SLOT_MASK
            before = self._waiting.get(slot) or _Waiting(now, now, is_first=False, has_tokens=False)
            made = self._waiting[slot] = replace(before, due=now, end=end)
            self._urgent.append((slot, made))
            self._num_ends += 1

    def next_moment(self) -> float:
        """When, by the simulation's clock, it sends the next end; inf if none waits: nothing depends on it before."""
        return max(self._free_at, self._urgent[0][1].due) if self._num_ends and self._urgent else math.inf

    def advance(self, now: float) -> None:
        """Sends what is due until `now`."""
        while (start := self._next_start()) <= now:
            self._turn(start)

    def _next_start(self) -> float:
        for line in (self._urgent, self._merging):
            while line and self._waiting.get(line[0][0]) is not line[0][1]:
                line.popleft()
        dues = [line[0][1].due for line in (self._urgent, self._merging) if line]
        return max(self._free_at, min(dues, default=math.inf))

    def _turn(self, start: float) -> None:
        """Makes messages of the streams that are due: first tokens and ends, then the others."""
        sent: list[tuple[int, _Waiting]] = []
        for line in (self._urgent, self._merging):
            while line and len(sent) < _TURN and line[0][1].due <= start:
                slot, waiting = line.popleft()
                if self._waiting.get(slot) is waiting:
                    del self._waiting[slot]
                    sent.append((slot, waiting))
        times = start + self._setup.message_seconds * np.arange(1, len(sent) + 1, dtype=np.float64)
        self._take_time(start, self._setup.message_seconds * len(sent))
        self.messages += len(sent)
        slots = np.array([slot for slot, _ in sent], np.int64)
        firsts = np.array([waiting.is_first for _, waiting in sent], np.bool_)
        has_tokens = np.array([waiting.has_tokens for _, waiting in sent], np.bool_)
        self._tally.take_tokens(slots[has_tokens], firsts[has_tokens], times[has_tokens])
        for (_, waiting), at in zip(sent, times.tolist(), strict=True):
            if waiting.end is not None:
                self._num_ends -= 1
                self._tally.end(waiting.end, at, at - waiting.since)

    def _take_time(self, start: float, seconds: float) -> None:
        self._free_at = start + seconds
        self.busy_seconds += seconds

    def _count(self, tokens: int, now: float) -> None:
        """Measures the load from which tokens wait."""
        self.tokens += tokens
        if (passed := now - self._window_from) >= _WINDOW_SECONDS:
            self._is_busy = self._window_tokens > BUSY_TOKENS * passed
            self._window_from, self._window_tokens = now, 0
        self._window_tokens += tokens


FRONTEND = "simulator"
# Wake-ups beyond this time are timeouts, which no virtual worker reaches.
_NEVER = 1e14
_TURNS_PER_LOAD_QUERY = 8


class Cell:
    """A core and `setup.workers` workers."""

    def __init__(self, setup: Setup, targets: dict[int, int], tally: Tally, first_worker: int) -> None:
        self.live = 0
        """Requests that were submitted here and have not ended."""
        self.load: Load | None = None
        """The core's last load report."""
        self.core_seconds = 0.0
        """The time that the core has taken."""
        self.on_step: Callable[[StepReport], None] | None = None
        self._setup, self._tally = setup, tally
        self._core = Scheduler(setup.config)
        self.front_ends = [FrontEnd(setup, tally) for _ in range(setup.front_ends)]
        """Each has an equal share of the streams. Without any, what they do takes no time."""
        # Requests on their way to the core: when each arrives, their number, the request.
        self._waiting: list[tuple[float, int, ev.Submit]] = []
        self._num_submitted = 0
        # The core is busy until then.
        self._free_at = 0.0
        self._ticked_at = -math.inf
        self._turns, self._was_idle = 0, True
        # Workers that were killed, and when each joins again.
        self._away: dict[str, float] = {}
        names = (f"worker-{number}" for number in range(first_worker, first_worker + setup.workers))
        self.workers = {name: SimulatedWorker(name, setup, targets) for name in names}

    def begin(self) -> None:
        """The front end and the workers join."""
        self._handle(ev.FrontendJoined(frontend=FRONTEND), 0.0)
        for name in self.workers:
            self._handle(ev.WorkerJoined(worker=name, info=self._setup.info), 0.0)

    def submit(self, request: ev.Submit, now: float) -> None:
        """A request arrives; the core takes it at its next turn, or when a front end has passed it on."""
        at = now
        if self.front_ends:
            at = self.front_ends[(request.stream >> SLOT_BITS) % len(self.front_ends)].admit(now)
        self._num_submitted += 1
        heapq.heappush(self._waiting, (at, self._num_submitted, request))
        self.live += 1

    def kill(self, name: str, now: float) -> None:
        """A worker dies; it joins again after `restart_seconds`. What it computes is lost."""
        if name in self._away:
            return
        self._away[name] = now + self._setup.restart_seconds
        self.workers[name].results.clear()
        self._handle(ev.WorkerLost(worker=name, reason="killed"), now)

    def next_moment(self) -> float:
        """When, by the simulation's clock, its core or a front end has something to do; inf if nothing is due."""
        return min([self._core_moment(), *(front_end.next_moment() for front_end in self.front_ends)])

    def _core_moment(self) -> float:
        moments = [worker.results[0][0] for worker in self.workers.values() if worker.results]
        moments += self._away.values()
        if self._waiting:
            moments.append(self._waiting[0][0])
        wake = self._core.next_wake()
        if wake is not None and wake < _NEVER:
            # If the core was already called at that time, the next call is the smallest step later.
            moments.append(wake if wake > self._ticked_at else math.nextafter(self._ticked_at, math.inf))
        return max(min(moments, default=math.inf), self._free_at)

    def is_due(self, now: float) -> bool:
        """Whether its core has something to do."""
        return self._core_moment() <= now

    def deliver(self, now: float) -> None:
        """The core handles the results that have arrived; workers join again."""
        for worker in self.workers.values():
            while worker.results and worker.results[0][0] <= now:
                self._take_time(now)
                self._handle(worker.results.popleft()[1], now)
        for name in [name for name, at in self._away.items() if at <= now]:
            del self._away[name]
            self._handle(ev.WorkerJoined(worker=name, info=self._setup.info), now)

    def plan(self, now: float) -> None:
        """The core handles the requests that have arrived, and plans."""
        while self._waiting and self._waiting[0][0] <= now:
            self._take_time(now)
            self._handle(heapq.heappop(self._waiting)[2], now)
        self._handle(ev.Tick(), now)
        self._ticked_at = now
        self._turns += 1
        is_idle = not any(worker.results for worker in self.workers.values())
        # The tally holds a load until the next one, so both ends of an idle time need one.
        if is_idle != self._was_idle or self._turns % _TURNS_PER_LOAD_QUERY == 0:
            self.report_load(now)
        self._was_idle = is_idle

    def report_load(self, now: float) -> None:
        self._handle(ev.LoadQuery(frontend=FRONTEND, query=0), now)

    def _pass_on(self, output: fx.StepOutput, now: float) -> None:
        """The core sends a step's tokens and ends to the front ends, or without any to the callers."""
        if not self.front_ends:
            self._tally.take(output, now)
            return
        streams: npt.NDArray[np.int64] = output.streams.astype(np.int64)
        slots, firsts, numbers = streams & SLOT_MASK, output.offsets == 0, (streams >> SLOT_BITS) % len(self.front_ends)
        for number, front_end in enumerate(self.front_ends):
            mine = numbers == number
            ends = [end for end in output.ends if (end.stream >> SLOT_BITS) % len(self.front_ends) == number]
            if ends or mine.any():
                front_end.take(slots[mine].tolist(), firsts[mine].tolist(), ends, now)

    def _take_time(self, now: float) -> None:
        self._free_at = max(self._free_at, now) + self._setup.core_seconds
        self.core_seconds += self._setup.core_seconds

    def _handle(self, event: ev.Event, now: float) -> None:
        leaves = max(now, self._free_at)
        for effect in self._core.handle(event, now):
            match effect:
                case fx.SendPlan():
                    self.workers[effect.worker].take(effect.plan, leaves)
                case fx.StepOutput():
                    self.live -= len(effect.ends)
                    self._pass_on(effect, leaves)
                case fx.Rejected():
                    self.live -= 1
                    self._tally.reject(effect)
                case fx.LoadReply():
                    self.load = effect.load
                case StepReport() if self.on_step is not None:
                    self.on_step(effect)
                case _:
                    pass
