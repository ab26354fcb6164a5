"""Owns the time at which a stream's handler sees new tokens: at once, or together with later ones.

Below `busy_tokens_per_second` every handler is woken at once. Above, tokens of a stream wait for `merge_seconds`, so
that one message carries several; then handlers are woken in the order of their oldest tokens, a few per turn of the
event loop. The loop thus reads new outputs and sends first tokens and ends, which never wait, between the messages of
other streams. If the loop cannot keep up, messages become larger, not more. Knows nothing of text or gRPC.
"""

import asyncio
import itertools
from collections.abc import Callable

from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.streaming.arrivals import Arrivals, SampleTokens
from scheduler_svc.frontend.streaming.limits import StreamLimits
from scheduler_svc.frontend.streaming.stream import RequestStream

# How often the load is measured.
_LOAD_SECONDS = 0.1
# Streams that are due so soon are woken together with those that are due now.
_EARLY_SECONDS = 0.001

PassOn = Callable[[SampleTokens], RequestStream | None]


class Wakeups:
    """`pass_on` gives tokens to their stream and returns it; None if no open stream takes them."""

    def __init__(self, limits: StreamLimits, pass_on: PassOn) -> None:
        self._limits = limits
        self._pass_on = pass_on
        self._is_busy = False
        self._rate_since = 0.0
        self._num_tokens_since = 0
        # Tokens that are not in their streams yet, and the timer that passes them on.
        self._arrivals = Arrivals()
        self._sorting: asyncio.TimerHandle | None = None
        # Streams with tokens that wait to be merged, and the arrival of the oldest one, oldest first.
        self._waiting: dict[RequestStream, float] = {}
        # Streams with tokens that leave in the next turn of the loop: all that arrive in this turn are one message.
        self._ready: dict[RequestStream, None] = {}
        # The next call of `_wake_due`.
        self._waking: asyncio.Handle | None = None

    def measure_load(self, num_tokens: int) -> None:
        """Counts a step's tokens."""
        now = asyncio.get_running_loop().time()
        if (seconds := now - self._rate_since) >= _LOAD_SECONDS:
            self._is_busy = self._num_tokens_since > self._limits.busy_tokens_per_second * seconds
            self._rate_since, self._num_tokens_since = now, 0
        self._num_tokens_since += num_tokens

    def hold(self, output: frontend_pb2.StepOutput) -> bool:
        """Keeps a step's output, for `sort_seconds`. Returns False if it must be handled now, after `release`."""
        loop = asyncio.get_running_loop()
        if not self._is_busy or not self._arrivals.add(output, loop.time()):
            return False
        if self._sorting is None:
            self._sorting = loop.call_later(self._limits.sort_seconds, self.release)
        return True

    def release(self) -> None:
        """Passes on every output that is kept."""
        if self._sorting is not None:
            self._sorting.cancel()
            self._sorting = None
        if not self._arrivals:
            return
        since = self._arrivals.since
        for tokens in self._arrivals.take():
            stream = self._pass_on(tokens)
            if stream is not None:
                self._waiting.setdefault(stream, since)
        self._schedule()

    def wake(self, stream: RequestStream) -> None:
        """Wakes a stream with a new token, in the next turn of the loop or after the time for merging."""
        if not self._is_busy:
            self.wake_soon(stream)
        elif stream not in self._waiting:
            self._waiting[stream] = asyncio.get_running_loop().time()
            self._schedule()

    def wake_soon(self, stream: RequestStream) -> None:
        """Wakes a stream with a new token in the next turn of the loop, at any load."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._wake_ready)
        self._ready[stream] = None

    def forget(self, stream: RequestStream) -> None:
        """Drops a stream that is closed."""
        self._ready.pop(stream, None)
        self._waiting.pop(stream, None)

    def _schedule(self) -> None:
        if self._waking is None and self._waiting:
            oldest = next(iter(self._waiting.values()))
            self._waking = asyncio.get_running_loop().call_at(oldest + self._limits.merge_seconds, self._wake_due)

    def _wake_ready(self) -> None:
        ready, self._ready = self._ready, {}
        for stream in ready:
            # An end may have woken the task meanwhile.
            if stream.has_pending:
                stream.wake()

    def _wake_due(self) -> None:
        loop, self._waking = asyncio.get_running_loop(), None
        due = loop.time() + _EARLY_SECONDS - self._limits.merge_seconds
        num_seen = 0
        for stream, since in list(itertools.islice(self._waiting.items(), self._limits.streams_per_turn)):
            if since > due:
                break
            num_seen += 1
            del self._waiting[stream]
            # As above.
            if stream.has_pending:
                stream.wake()
        if num_seen == self._limits.streams_per_turn:
            self._waking = loop.call_soon(self._wake_due)
        else:
            self._schedule()
