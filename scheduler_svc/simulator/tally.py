"""Counts what a simulation yields as it runs: latencies, tokens, ends, pages over time.

Owns the counts and the slots of live requests. Its memory grows with the requests that are live at once, not with all
requests of the run.

**Percentiles** of a stream of durations take constant memory. Each bucket is half a percent wider than the one before
it, so a percentile is off by at most a quarter of a percent. Maximum, mean and count are exact.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages.reports import Load
from scheduler_svc.simulator.cost import FloatArray
from scheduler_svc.simulator.worker import SLOT_BITS, SLOT_MASK

_MIN, _MAX = 1e-6, 1e6
_GROWTH = math.log(1.005)
_NUM = math.ceil(math.log(_MAX / _MIN) / _GROWTH) + 2


class Histogram:
    """A histogram of seconds. Values outside one microsecond to a million seconds fall into the outermost buckets."""

    def __init__(self) -> None:
        self._counts = np.zeros(_NUM, np.int64)
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, seconds: FloatArray) -> None:
        """Adds float64[n]."""
        if not len(seconds):
            return
        low, high = float(seconds.min()), float(seconds.max())
        bucket = _bucket(high)
        if _bucket(low) == bucket:
            # The usual case: all rows that decode in two successive steps waited equally long.
            self._counts[bucket] += len(seconds)
        else:
            logs = np.log(np.clip(seconds, _MIN, _MAX) / _MIN)
            self._counts += np.bincount((logs / _GROWTH).astype(np.int64) + 1, minlength=_NUM)
        self.count += len(seconds)
        self.total += float(seconds.sum())
        self.largest = max(self.largest, high)

    def add_one(self, seconds: float) -> None:
        self._counts[_bucket(seconds)] += 1
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    @property
    def mean(self) -> float:
        """The mean, 0 if the histogram is empty."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Returns the middle of the bucket that holds this percentile, 0 if the histogram is empty."""
        if not self.count:
            return 0.0
        rank = max(1, math.ceil(self.count * percent / 100))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(self.largest, _MIN * math.exp((bucket - 0.5) * _GROWTH))


def _bucket(seconds: float) -> int:
    return int(math.log(min(max(seconds, _MIN), _MAX) / _MIN) / _GROWTH) + 1


_MAX_POINTS = 512


class Latencies:
    """Latencies of a set of requests: to the first token, between tokens, in the queue, from arrival to end."""

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.itl = Histogram()
        self.queue = Histogram()
        self.total = Histogram()


class Point(NamedTuple):
    """The core's load at one time: seconds of the simulation's clock, pages, requests."""

    at: float
    pages_used: int
    pages_cached: int
    running: int
    waiting: int


class Tally:
    """The counts of one simulation. With several tenants the first and the others are also counted apart."""

    def __init__(self, *, tenants: int = 1, ttft_limit: float = 0.0) -> None:
        """Counts first tokens that come later than `ttft_limit` seconds, unless it is 0."""
        self.all_requests = Latencies()
        self.groups: list[Latencies] = [Latencies(), Latencies()] if tenants > 1 else []
        self.ends: Counter[str] = Counter()
        self.submitted = self.finished = self.rejected = self.failed = 0
        self.too_late = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self.recomputed_tokens = self.discarded_tokens = 0
        self.preempted_requests = 0
        self.first_at = self.last_at = 0.0
        self.timeline: list[Point] = []
        """At most 512 points, evenly spread. When there are more, every second one is dropped."""
        self._gap = 0.0
        self.pages_used_max = self.pages_held_max = 0
        # Integrals over time: pages used, pages cached, requests running.
        self._integrals: FloatArray = np.zeros(3)
        self._point: Point | None = None
        self._ttft_limit = ttft_limit
        self._free: list[int] = []
        self._arrived: FloatArray = np.zeros(1024)
        self._token_at: FloatArray = np.zeros(1024)
        self._group: npt.NDArray[np.int8] = np.zeros(1024, np.int8)
        self._slots = 0

    @property
    def live(self) -> int:
        """Requests submitted and not ended."""
        return self._slots - len(self._free)

    @property
    def missed(self) -> int:
        """Requests that got their first token too late, or never."""
        return self.too_late + self.rejected + self.failed

    def enter(self, now: float, tenant: int) -> int:
        """Counts a new request. Returns its stream. The low bits of the stream are its slot."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._slots = self._slots, self._slots + 1
        assert slot <= SLOT_MASK
        if slot == len(self._arrived):
            self._arrived = np.concatenate([self._arrived, np.zeros_like(self._arrived)])
            self._token_at = np.concatenate([self._token_at, np.zeros_like(self._token_at)])
            self._group = np.concatenate([self._group, np.zeros_like(self._group)])
        self._arrived[slot] = now
        self._group[slot] = tenant > 0
        if not self.submitted:
            self.first_at = now
        self.submitted += 1
        return self.submitted << SLOT_BITS | slot

    def reject(self, effect: fx.Rejected) -> None:
        self.rejected += 1
        self.ends[f"rejected: {effect.code}"] += 1
        self._free.append(effect.stream & SLOT_MASK)

    def take(self, output: fx.StepOutput, now: float) -> None:
        """Counts a step's tokens and ends."""
        if len(output.streams):
            slots = (output.streams & np.uint64(SLOT_MASK)).astype(np.int64)
            self.take_tokens(slots, output.offsets == 0, np.full(len(slots), now))
        for end in output.ends:
            self.end(end, now)

    def take_tokens(self, slots: npt.NDArray[np.int64], is_first: npt.NDArray[np.bool_], times: FloatArray) -> None:
        """Counts what reaches callers at these times: a token, or a message with several of one stream."""
        if is_first.any():
            self._take_firsts(slots[is_first], times[is_first])
        later = slots[~is_first]
        gaps = times[~is_first] - self._token_at[later]
        self.all_requests.itl.add(gaps)
        for group, latencies in enumerate(self.groups):
            latencies.itl.add(gaps[self._group[later] == group])
        self._token_at[slots] = times

    def _take_firsts(self, slots: npt.NDArray[np.int64], times: FloatArray) -> None:
        waits = times - self._arrived[slots]
        self.all_requests.ttft.add(waits)
        for group, latencies in enumerate(self.groups):
            latencies.ttft.add(waits[self._group[slots] == group])
        if self._ttft_limit:
            self.too_late += int((waits > self._ttft_limit).sum())

    def end(self, end: fx.End, now: float, delay: float = 0.0) -> None:
        """Counts an end that reaches its caller `delay` seconds after it left the core."""
        stats, slot = end.stats, end.stream & SLOT_MASK
        if end.failure is not None:
            self.ends[f"failed: {end.failure.code}"] += 1
            self.failed += 1
        else:
            self.ends[str(end.reason)] += 1
            self.finished += 1
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += stats.cached_prompt_tokens
        self.all_requests.queue.add_one(stats.queue_seconds)
        self.all_requests.total.add_one(stats.total_seconds + delay)
        if self.groups:
            group = self.groups[int(self._group[slot])]
            group.queue.add_one(stats.queue_seconds)
            group.total.add_one(stats.total_seconds + delay)
        self.output_tokens += stats.output_tokens
        self.recomputed_tokens += stats.recomputed_tokens
        self.discarded_tokens += stats.discarded_tokens
        self.preempted_requests += stats.preemptions > 0
        self.last_at = max(self.last_at, now)
        self._free.append(slot)

    def observe(self, load: Load, now: float) -> None:
        """Takes the core's load. The load before it counts until `now`."""
        point = Point(now, load.pages_used, load.pages_cached, load.running, load.waiting)
        if (before := self._point) is not None:
            self._integrals += (now - before.at) * np.array([before.pages_used, before.pages_cached, before.running])
        self._point = point
        self.pages_used_max = max(self.pages_used_max, point.pages_used)
        self.pages_held_max = max(self.pages_held_max, point.pages_used + point.pages_cached)
        if not self.timeline or now - self.timeline[-1].at >= self._gap:
            self.timeline.append(point)
        if len(self.timeline) > _MAX_POINTS:
            self.timeline = self.timeline[::2]
            self._gap = (self.timeline[-1].at - self.timeline[0].at) / (len(self.timeline) - 1)

    def means(self) -> list[float]:
        """Returns means over time: pages used, pages cached, requests running."""
        seconds = 0.0 if self._point is None else self._point.at - self.timeline[0].at
        return (self._integrals / seconds).tolist() if seconds > 0 else [0.0] * 3
