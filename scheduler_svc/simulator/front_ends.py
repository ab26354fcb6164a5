"""The front ends of one service, as far as they take time: a request and a message each cost CPU of one process.

Owns that time, and when requests reach the core and tokens their callers. As in the service, first tokens and ends
leave first; above `BUSY_TOKENS` per second the other tokens of a stream wait for `MERGE_SECONDS`, so that one message
carries several. A front end that cannot keep up sends later, and so more tokens in a message.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.simulator.tally import Tally
from scheduler_svc.simulator.worker import SLOT_BITS, SLOT_MASK, FrontEndCosts

# Those of the service (scheduler_svc/frontend/streaming/stream.py).
BUSY_TOKENS, MERGE_SECONDS = 5000.0, 0.015
_WINDOW_SECONDS = 0.1
# Streams whose messages are made before new ones are looked at.
_TURN = 16


@dataclass(slots=True)
class _Waiting:
    """Tokens of one stream that have not been sent."""

    due: float
    # When the oldest of them came from the core.
    since: float
    is_first: bool
    has_tokens: bool = True
    end: fx.End | None = None


class FrontEnd:
    """One process."""

    def __init__(self, costs: FrontEndCosts, tally: Tally) -> None:
        self.busy_seconds = 0.0
        self.messages = 0
        self.tokens = 0
        self._costs, self._tally = costs, tally
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
        self._take_time(max(now, self._free_at), self._costs.request_seconds)
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

    def next_moment(self) -> float | None:
        """When it sends the next end, if one waits: until then nothing depends on it."""
        return max(self._free_at, self._urgent[0][1].due) if self._num_ends and self._urgent else None

    def advance(self, now: float) -> None:
        """Sends what is due until `now`."""
        while (start := self._next_start()) is not None and start <= now:
            self._turn(start)

    def _next_start(self) -> float | None:
        for line in (self._urgent, self._merging):
            while line and self._waiting.get(line[0][0]) is not line[0][1]:
                line.popleft()
        dues = [line[0][1].due for line in (self._urgent, self._merging) if line]
        return max(self._free_at, min(dues)) if dues else None

    def _turn(self, start: float) -> None:
        """Makes messages of the streams that are due: first tokens and ends, then the others."""
        sent: list[tuple[int, _Waiting]] = []
        for line in (self._urgent, self._merging):
            while line and len(sent) < _TURN and line[0][1].due <= start:
                slot, waiting = line.popleft()
                if self._waiting.get(slot) is waiting:
                    del self._waiting[slot]
                    sent.append((slot, waiting))
        times = start + self._costs.message_seconds * np.arange(1, len(sent) + 1, dtype=np.float64)
        self._take_time(start, self._costs.message_seconds * len(sent))
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


class FrontEnds:
    """The front ends of one service, each of which has an equal share of the streams."""

    def __init__(self, costs: FrontEndCosts, tally: Tally) -> None:
        self.each = [FrontEnd(costs, tally) for _ in range(costs.count)]

    def admit(self, stream: int, now: float) -> float:
        """A request arrives. Returns when the core gets it."""
        return self.each[(stream >> SLOT_BITS) % len(self.each)].admit(now)

    def take(self, output: fx.StepOutput, now: float) -> None:
        """The core sends a step's tokens and ends."""
        streams: npt.NDArray[np.int64] = output.streams.astype(np.int64)
        slots, firsts, numbers = streams & SLOT_MASK, output.offsets == 0, (streams >> SLOT_BITS) % len(self.each)
        for number, front_end in enumerate(self.each):
            mine = numbers == number
            ends = [end for end in output.ends if (end.stream >> SLOT_BITS) % len(self.each) == number]
            if ends or mine.any():
                front_end.take(slots[mine].tolist(), firsts[mine].tolist(), ends, now)

    def next_moment(self) -> float | None:
        """When one of them has to be looked at again."""
        return min((at for each in self.each if (at := each.next_moment()) is not None), default=None)

    def advance(self, now: float) -> None:
        """They send what is due."""
        for each in self.each:
            each.advance(now)
