"""Keeps a process running: starts it, and starts it again when it ends, until a restart cannot help.

`Restart` decides whether and when; it does no I/O, and time and randomness are its arguments. `Supervisor` owns one
process over all its lives. It has no thread and never waits: its owner calls `look`, which does what is due and
says when to look again; `wake` is called when that must be earlier. So only `look` changes its state, in one thread:

    PAUSED  ── started ──▶ STARTING ── serves ──▶ SERVING
    STARTING, SERVING ── ended ──▶ PAUSED, or GIVEN_UP if a restart cannot help
    GIVEN_UP ── retry ──▶ PAUSED
    any ── stop, and no process runs ──▶ STOPPED
"""

import contextlib
import math
import queue
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from tandem_contract.child import Child, Program
from tandem_contract.logs import last_line
from tandem_contract.stopping import STOP, STOP_NOW, is_stop

# The exit code of all programs for wrong settings.
WRONG_SETTINGS = 2
# The exit status of a process that the system could not start, and what is said of it.
NOT_STARTED, NOT_STARTED_WORDS = 1, "could not be started"
# Enough for the stacks of a process that ends by a fatal signal, before which the signal is named.
_KEPT_LINES = 200
# A driver that looks later than this after its last look was stalled itself, and so was what it heard.
_STALLED_SECONDS = 1.0
# How often a pause asks whether it may end early.
_URGENT_SECONDS = 0.2


class OnZero(Enum):
    """What an end with status 0 is of a process that has served."""

    AGAIN = "it was drained, or an operator stopped it: another starts at once"
    WANTED = "it was drained: no other is started"
    CRASH = "as any other status"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Pauses that double; gives up where a restart cannot help.

    A process that served for `steady_seconds`, and for as long as its start took, begins the pauses again. Its own is
    the first one, or none if `steady_at_once`: such starts take at most half of the time.
    """

    first_pause_seconds: float = 0.5
    last_pause_seconds: float = 30.0
    # A random factor between 0.5 and 1 spreads the restarts of several processes that ended at the same time.
    jitter: bool = True
    steady_seconds: float = 3.0
    # Whether they are counted from its start, for a process that does not report when it serves.
    steady_from_start: bool = False
    steady_at_once: bool = True
    on_zero: OnZero = OnZero.AGAIN
    # A process that never served is not started again: its settings, model or machine are at fault.
    needs_service: bool = True
    # Whether each process is judged by itself: by `final` if it did not serve, though an earlier one did, and by status
    # 0 as drained though none has served.
    each_alone: bool = False
    # Statuses after which one that never served is not started again; after it served, 2 may mean a port that is taken
    # for a moment.
    final: frozenset[int] = frozenset({WRONG_SETTINGS})
    # This many ends within `window_seconds` are a crash loop; within infinity: in a row, with no steady life between.
    # None: it goes on, because something else reports it.
    max_ends: int | None = None
    window_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The process is not started again; `why` continues a sentence about its end."""

    why: str
    wrong_settings: bool = False
    # Whether it was asked to end.
    in_order: bool = False


_DRAINED = GiveUp(" because it was drained", in_order=True)
_STOPPED, _OVERDUE = GiveUp(" because it was stopped", in_order=True), GiveUp("")


class Restart:
    """Applies a policy to the ends of one process."""

    def __init__(self, policy: Policy, rng: random.Random | None = None) -> None:
        self.policy, self.rng = policy, rng or random.Random()
        self._pause_seconds = 0.0
        self._ends: deque[float] = deque()

    def decide(
        self, *, at: float, status: int, ever_served: bool, start_seconds: float, served_seconds: float
    ) -> float | GiveUp:
        """Returns the pause in seconds before the process is started again, or why it is not.

        `at` is the time of the end on a monotonic clock; ends are given in order of time. `status` is the exit status,
        negative for a signal. `ever_served`: the process, or an earlier one in its place, served at some time.
        `start_seconds`: how long this process took until it served. `served_seconds`: how long it served; 0 if it did
        not.
        """
        policy = self.policy
        if status == 0 and (ever_served or policy.each_alone) and policy.on_zero != OnZero.CRASH:
            self._begin_anew()
            return _DRAINED if policy.on_zero == OnZero.WANTED else 0.0
        if not ever_served and is_stop(status):
            # An operator stopped it during its start, so it is not at fault.
            return _STOPPED if policy.on_zero == OnZero.WANTED else self._next_pause()
        has_served = served_seconds > 0 if policy.each_alone else ever_served
        if not has_served and status in policy.final:
            return GiveUp("", wrong_settings=True)
        if not ever_served and policy.needs_service:
            return GiveUp(" before it served")
        if policy.steady_from_start:
            is_steady = start_seconds + served_seconds >= policy.steady_seconds
        else:
            is_steady = served_seconds >= max(policy.steady_seconds, start_seconds)
        if is_steady:
            self._begin_anew()
        if (times := self._crash_loop(at)) is not None:
            return GiveUp(f"{times}; it is not started again")
        return 0.0 if is_steady and policy.steady_at_once else self._next_pause()

    def _begin_anew(self) -> None:
        self._pause_seconds = 0.0
        if self.policy.window_seconds == math.inf:
            self._ends.clear()

    def _crash_loop(self, at: float) -> str | None:
        """Notes an end, by the clock of `decide`; returns how many there were if they are too many."""
        policy = self.policy
        if policy.max_ends is None:
            return None
        self._ends.append(at)
        while self._ends[0] <= at - policy.window_seconds:
            self._ends.popleft()
        if len(self._ends) < policy.max_ends:
            return None
        within = "in a row" if policy.window_seconds == math.inf else f"within {policy.window_seconds:g} s"
        return f", {len(self._ends)} times {within}" if policy.max_ends > 1 else ""

    def _next_pause(self) -> float:
        """Returns the pause in seconds, and doubles it for the next end."""
        seconds = self._pause_seconds or self.policy.first_pause_seconds
        self._pause_seconds = min(2 * seconds, self.policy.last_pause_seconds)
        return seconds * self.rng.uniform(0.5, 1.0) if self.policy.jitter else seconds


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    # Before the first start too.
    PAUSED = "pausing"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


_FROM: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.PAUSED}),
    State.SERVING: frozenset({State.STARTING}),
    # From itself: the system could not start it.
    State.PAUSED: frozenset({State.STARTING, State.SERVING, State.GIVEN_UP, State.PAUSED}),
    State.GIVEN_UP: frozenset({State.STARTING, State.SERVING, State.PAUSED}),
    State.STOPPED: frozenset({State.STARTING, State.SERVING, State.PAUSED, State.GIVEN_UP}),
}


class Heard(Enum):
    """What a line means. Only WORDS are kept as possible last words."""

    WORDS = "words"
    SERVES = "it serves now"
    ALIVE = "it is alive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    name: str
    status: int
    # Continues a sentence, like `was ended by SIGKILL`.
    how: str
    # Its own last words.
    cause: str
    # The pause in seconds before it is started again.
    then: float | GiveUp
    # Whether it was killed because it did not end in time.
    is_overdue: bool = False

    @property
    def told(self) -> str:
        """Continues a sentence too: how it ended, why no other is started, and its last words."""
        why = self.then.why if isinstance(self.then, GiveUp) else ""
        return f"{self.how}{why}: {self.cause}"

    def __str__(self) -> str:
        if isinstance(self.then, GiveUp):
            return f"the {self.name} {self.told}"
        return f"the {self.name} {self.how}; it starts again {f'in {self.then:.1f} s' if self.then else 'at once'}"


class ServiceEnded(Exception):
    """A process ended and is not started again; the message is one line that closes with its own last words."""

    def __init__(self, message: str, *, wrong_settings: bool = False, in_order: bool = False) -> None:
        super().__init__(message)
        self.wrong_settings, self.in_order = wrong_settings, in_order


class Life(Protocol):
    """What a supervisor needs of a `Child`."""

    pid: int
    end: int | None

    def take(self) -> list[str]: ...
    def signal(self, number: signal.Signals) -> None: ...
    def kill(self) -> None: ...
    def how_it_ended(self) -> str: ...


class Supervisor:
    """Keeps one process running. Its public attributes are read by others; all methods but `look` may be, too."""

    def __init__(
        self,
        name: str,
        program: Callable[[], Program | None],
        policy: Policy,
        *,
        hear: Callable[[str], Heard],
        on_change: Callable[["Supervisor"], None] = lambda _: None,
        on_end: Callable[["Supervisor"], None] = lambda _: None,
        silence_seconds: float = math.inf,
        on_silence: Callable[[], None] = lambda: None,
        start: Callable[[Program, Callable[[], None]], Life] = Child,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """`program` is asked before each start. None: there is nothing to start yet, and the next look asks again.
        OSError: the start has failed.

        `look` calls `hear` with each line, and `on_change` at each change of state: after the last line of a process,
        `ended` says how it ended. `on_end` is called then too, unless it was to stop. A process that serves and prints
        nothing for `silence_seconds` is killed.
        """
        self.name = name
        self.state, self.since = State.PAUSED, clock()
        # That of the running process; 0 if none runs.
        self.pid = 0
        self.num_starts = 0
        self.ended: Ended | None = None
        # The output of the last process.
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        # Called, in any thread, when `look` is due at once.
        self.wake: Callable[[], None] = lambda: None
        self._program, self._restart = program, Restart(policy, rng)
        self._hear, self._on_change, self._when_ended = hear, on_change, on_end
        self._silence_seconds, self._on_silence = silence_seconds, on_silence
        self._start_life, self._clock = start, clock
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._life: Life | None = None
        self._ever_served = False
        self._started_at, self._served_at = 0.0, math.inf
        self._heard_at, self._looked_at = 0.0, -math.inf
        # By the clock: when the next process starts; when the one that runs is killed. If that is set, no other starts.
        self._start_at: float = -math.inf
        self._kill_at: float | None = None
        self._grace_seconds, self._is_overdue = 0.0, False

    # What others ask for. It happens in the next look.

    def mark_serving(self) -> None:
        """Notes that the process that runs serves, for a caller that learns it elsewhere than from its lines."""
        life = self._life
        self._ask(lambda: self._serve() if self._life is life is not None else None)

    def hurry(self) -> None:
        self._ask(self._end_pause)

    def retry(self) -> bool:
        """Starts a process that was given up. Returns whether it was."""
        is_given_up = self.state == State.GIVEN_UP
        if is_given_up:
            self._ask(self._begin_again)
        return is_given_up

    def start_no_more(self) -> None:
        """Lets the process run, and starts no other. Once that is so, more calls do nothing, and wake nobody."""
        if self._kill_at is None:
            self._ask(lambda: self._stop(None))

    def stop(self, grace_seconds: float) -> None:
        """Asks the process to end in order, kills it after the grace, and starts no other."""
        self._ask(lambda: self._stop(grace_seconds))

    def stop_now(self) -> None:
        """Asks the process that runs to end at once, without a start of another one if `stop` was called."""
        self.signal(STOP_NOW)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process that runs, at once."""
        if (life := self._life) is not None:
            life.signal(number)

    def kill(self) -> None:
        """Kills the process that runs and what it started, at once."""
        if (life := self._life) is not None:
            life.kill()

    def failure(self) -> ServiceEnded:
        """Why it was given up, to be raised."""
        assert self.ended is not None and isinstance(self.ended.then, GiveUp)
        then = self.ended.then
        return ServiceEnded(str(self.ended), wrong_settings=then.wrong_settings, in_order=then.in_order)

    def _ask(self, request: Callable[[], None]) -> None:
        self._asked.put(request)
        self.wake()

    # What happens, in the driver's thread.

    def look(self) -> float | None:
        """Does what is due. Returns the seconds until it must be called again; None: not before `wake`."""
        now = self._clock()
        self._take(now)
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()
        if self._life is not None and self._life.end is not None:
            self._on_end(now, self._life.end, self._life.how_it_ended())
        if self._life is None and self._kill_at is not None and self.state != State.STOPPED:
            self._enter(State.STOPPED)
        if self.state == State.PAUSED and now >= self._start_at:
            self._start(now)
        if self._life is not None:
            return self._watch(now)
        return max(0.0, self._start_at - now) if self.state == State.PAUSED and self._start_at > -math.inf else None

    def _take(self, now: float) -> None:
        for line in self._life.take() if self._life is not None else ():
            heard = self._hear(line)
            if heard != Heard.WORDS:
                self._heard_at = now
            if heard != Heard.ALIVE:
                self.lines.append(line)
            if heard == Heard.SERVES:
                self._serve()

    def _watch(self, now: float) -> float | None:
        """Kills the process if that is due; returns when it may be."""
        assert self._life is not None
        if now - self._looked_at > _STALLED_SECONDS:
            self._heard_at = now
        self._looked_at = now
        if self.state == State.SERVING and now - self._heard_at > self._silence_seconds:
            self._on_silence()
            self._heard_at = now
            self._life.kill()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at, self._is_overdue = math.inf, True
            self._life.kill()
        dues = [_STALLED_SECONDS / 2] if self._silence_seconds < math.inf else []
        if self._kill_at is not None and self._kill_at < math.inf:
            dues.append(self._kill_at - now)
        return min(dues, default=None)

    def _start(self, now: float) -> None:
        self._started_at, self._served_at = now, math.inf
        try:
            program = self._program()
            if program is None:
                self._start_at = -math.inf
                return
            self.num_starts += 1
            self.lines.clear()
            self._life = self._start_life(program, lambda: self.wake())
        except OSError as error:
            self.lines.append(str(error.strerror))
            self._on_end(now, NOT_STARTED, NOT_STARTED_WORDS)
            return
        self.pid = self._life.pid
        self._enter(State.STARTING)

    def _serve(self) -> None:
        self._ever_served = True
        if self.state == State.STARTING:
            self._served_at = self._clock()
            self._enter(State.SERVING)

    def _on_end(self, now: float, status: int, how: str) -> None:
        self._life, self.pid = None, 0
        served_at = min(now, self._served_at)
        then: float | GiveUp = _STOPPED
        if self._kill_at is None:
            then = self._restart.decide(
                at=now,
                status=status,
                ever_served=self._ever_served,
                start_seconds=served_at - self._started_at,
                served_seconds=now - served_at,
            )
        if is_overdue := self._is_overdue and status != 0:
            # Also one that was stopped by SIGSTOP, which the order does not wake.
            how, then = f"did not end within {self._grace_seconds:g} s and was killed", _OVERDUE
        cause = last_line(self.lines)
        self.ended = Ended(name=self.name, status=status, how=how, cause=cause, then=then, is_overdue=is_overdue)
        if isinstance(then, GiveUp):
            self._enter(State.GIVEN_UP if self._kill_at is None else State.STOPPED)
        else:
            self._start_at = now + then
            self._enter(State.PAUSED)
        if self.state != State.STOPPED:
            self._when_ended(self)

    def _stop(self, grace_seconds: float | None) -> None:
        if grace_seconds is None:
            self._kill_at = self._kill_at or math.inf
            return
        self._kill_at, self._grace_seconds = self._clock() + grace_seconds, grace_seconds
        if self._life is not None:
            self._life.signal(STOP)

    def _end_pause(self) -> None:
        self._start_at = -math.inf

    def _begin_again(self) -> None:
        if self.state == State.GIVEN_UP and self._kill_at is None:
            self._restart = Restart(self._restart.policy, self._restart.rng)
            self._start_at = -math.inf
            self._enter(State.PAUSED)

    def _enter(self, state: State) -> None:
        assert self.state in _FROM[state], f"{self.name}: from {self.state} to {state}"
        self.state, self.since = state, self._clock()
        self._on_change(self)


def run(supervisor: Supervisor) -> None:
    """Keeps the process running from this thread until it is stopped; the kernel may end it with the thread."""
    woken = threading.Event()
    supervisor.wake = woken.set
    while True:
        woken.clear()
        due = supervisor.look()
        if supervisor.state == State.STOPPED:
            return
        woken.wait(due)


async def run_async(supervisor: Supervisor, is_urgent: Callable[[], Awaitable[bool]] | None = None) -> None:
    """Keeps the process running from this task until it is stopped. Raises ServiceEnded when it is given up.

    `is_urgent` is asked again and again during a pause, which ends when it returns True.
    """
    # The programs that run a supervisor in a thread do not import it.
    import asyncio

    loop, woken = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        # A thread may find that the loop has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(woken.set)

    supervisor.wake = wake
    while True:
        woken.clear()
        due = supervisor.look()
        if supervisor.state == State.STOPPED:
            return
        if supervisor.state == State.GIVEN_UP:
            raise supervisor.failure()
        if due and supervisor.state == State.PAUSED and is_urgent is not None:
            if await is_urgent():
                supervisor.hurry()
            due = min(due, _URGENT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(due):
                await woken.wait()
