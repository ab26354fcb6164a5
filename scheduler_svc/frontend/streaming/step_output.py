"""Owns the reading of the core's StepOutputs: passes tokens, logprobs and ends to the samples of open streams.

A stream with tokens that do not follow each other is reported as broken.

Owns also the time at which a stream's handler sees new tokens: at once, or above `busy_tokens_per_second` together with
later ones. Then handlers are woken in the order of their oldest tokens, a few per turn of the event loop, so that it
reads new outputs and sends first tokens and ends, which never wait, between the messages of other streams.

Outputs that arrive under load are sorted by sample together: a loop over the tokens of a step costs half a microsecond
per token; sorted by numpy, the tokens of several steps cost one microsecond per sample.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.streaming.stream import (
    BYTES_PER_TOKEN,
    RequestStream,
    SampleStream,
    StreamLimits,
    read_logprobs,
    read_step_logprobs,
)
from tandem_contract.plural import numbered

# The numbers of a step's streams, the offsets and the tokens.
_StepTokens = tuple[NDArray[np.uint64], NDArray[np.int32], NDArray[np.int32]]
# The id of a sample, the offset of its first token, the number of tokens, whether their offsets are consecutive, and
# the tokens as int32 of this machine.
SampleTokens = tuple[int, int, int, bool, bytes]


@dataclass(slots=True, eq=False)
class Arrivals:
    """Tokens of several steps, in order of arrival."""

    # The loop's time at which the oldest token arrived.
    since: float = 0.0
    _steps: list[_StepTokens] = field(default_factory=list[_StepTokens])

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, output: frontend_pb2.StepOutput, now: float) -> bool:
        """Keeps a step's tokens. Returns False if it may not wait: it has a first token, or more than tokens."""
        if output.ends or output.prompt_logprobs or output.HasField("logprobs") or not output.tokens:
            return False
        offsets = np.frombuffer(output.offsets, "<i4")
        if not offsets.all():
            return False
        if not self._steps:
            self.since = now
        self._steps.append((np.frombuffer(output.streams, "<u8"), offsets, np.frombuffer(output.tokens, "<i4")))
        return True

    def take(self) -> Iterator[SampleTokens]:
        """Removes all tokens. Yields those of one sample after another."""
        streams, offsets, tokens = map(np.concatenate, zip(*self._steps, strict=True))
        self._steps = []
        order = np.argsort(streams, kind="stable")
        streams, offsets, tokens = streams[order], offsets[order], tokens[order]
        is_start = np.empty(len(streams), np.bool_)
        is_start[0] = True
        np.not_equal(streams[1:], streams[:-1], out=is_start[1:])
        starts = np.flatnonzero(is_start)
        is_broken = np.diff(offsets, prepend=0) != 1
        is_broken[starts] = False
        num_broken = np.add.reduceat(is_broken, starts, dtype=np.int64)
        # Plain values, because the loop over the samples costs more than all of the above.
        data = tokens.astype("i4").tobytes()
        ends = [*starts[1:].tolist(), len(streams)]
        of_samples = (streams[starts].tolist(), offsets[starts].tolist(), starts.tolist(), ends, num_broken.tolist())
        for sample_id, first, start, end, broken in zip(*of_samples, strict=True):
            yield sample_id, first, end - start, not broken, data[BYTES_PER_TOKEN * start : BYTES_PER_TOKEN * end]


# How often the load is measured.
_LOAD_SECONDS = 0.1
# Streams that are due so soon are woken together with those that are due now.
_EARLY_SECONDS = 0.001


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StepOutputReader:
    """Has the samples of all open streams, and a function that ends a stream with the message of an error."""

    _samples: Mapping[int, SampleStream]
    _limits: StreamLimits
    _fail_broken: Callable[[RequestStream, str], None]
    _is_busy: bool = False
    _rate_since: float = 0.0  # on the loop's clock
    _num_tokens_since: int = 0
    # Tokens that are not in their streams yet, and the timer that passes them on.
    _arrivals: Arrivals = field(default_factory=Arrivals)
    _sorting: asyncio.TimerHandle | None = None
    # Streams with tokens that wait to be merged, and the arrival of the oldest one, oldest first.
    _waiting: dict[RequestStream, float] = field(default_factory=dict[RequestStream, float])
    # Streams with tokens that leave in the next turn of the loop: all that arrive in this turn are one message.
    _ready: dict[RequestStream, None] = field(default_factory=dict[RequestStream, None])
    # The next call of `_wake_due`.
    _waking: asyncio.Handle | None = None

    def forget(self, stream: RequestStream) -> None:
        self._ready.pop(stream, None)
        self._waiting.pop(stream, None)

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

    def read(self, output: frontend_pb2.StepOutput) -> None:
        """Passes a step's tokens and ends to their streams. Drops those of closed streams."""
        num_tokens = len(output.tokens) // 4
        num_bytes = (len(output.streams), len(output.offsets), len(output.tokens))
        if num_bytes != (8 * num_tokens, 4 * num_tokens, 4 * num_tokens):
            logger.error("dropped a step's output: its arrays differ in length")
            return
        self._measure_load(num_tokens)
        loop = asyncio.get_running_loop()
        if self._is_busy and self._arrivals.add(output, loop.time()):
            if self._sorting is None:
                self._sorting = loop.call_later(self._limits.sort_seconds, self.release)
            return
        self.release()
        for piece in output.prompt_logprobs:
            self._put_prompt_logprobs(piece)
        received, row_of_entry = read_step_logprobs(output)
        streams = np.frombuffer(output.streams, "<u8").tolist()
        offsets = np.frombuffer(output.offsets, "<i4").tolist()
        tokens = np.frombuffer(output.tokens, "<i4").tolist()
        for entry, (sample_id, offset, token) in enumerate(zip(streams, offsets, tokens, strict=True)):
            sample = self._samples.get(sample_id)
            if sample is None or sample.is_stopped or sample.stream.failure:
                continue
            stream = sample.stream
            if offset != sample.num_received or offset >= stream.max_new_tokens:
                expected = f"token {sample.num_received} of {stream.max_new_tokens}"
                self._fail_broken(stream, f"token {offset} came instead of {expected}")
                continue
            if sample.logprobs is not None:
                row = row_of_entry.get(entry)
                if received is None or row is None or not sample.logprobs.put(received, slice(row, row + 1)):
                    self._fail_broken(stream, f"token {offset} came without the requested logprobs")
                    continue
            sample.num_received += 1
            sample.pending.append(token)
            if offset:
                self._wake(stream)
            else:
                self._wake_soon(stream)
        for end in output.ends:
            if sample := self._samples.get(end.stream):
                sample.end = end
                sample.stream.wake()

    def _put_prompt_logprobs(self, piece: frontend_pb2.PromptLogprobs) -> None:
        sample = self._samples.get(piece.stream)
        if sample is None or sample.stream.failure:
            return
        stream = sample.stream
        try:
            fits = stream.prompt is not None and stream.prompt.put(piece.start, read_logprobs(piece))
        except ValueError:
            fits = False
        if not fits:
            self._fail_broken(stream, f"unexpected logprobs of the prompt came, from token {piece.start} on")
        stream.wake()

    def _pass_on(self, tokens: SampleTokens) -> RequestStream | None:
        """Passes tokens of several steps to their sample. Returns its stream, if it is open and takes them."""
        sample_id, first, count, is_complete, data = tokens
        sample = self._samples.get(sample_id)
        if sample is None or sample.is_stopped or sample.stream.failure:
            return None
        stream = sample.stream
        if first != sample.num_received or not is_complete or first + count > stream.max_new_tokens:
            expected = f"{numbered(count, 'token')} from {sample.num_received} on, of {stream.max_new_tokens}"
            self._fail_broken(stream, f"{numbered(count, 'token')} from {first} on came instead of {expected}")
            return None
        if sample.logprobs is not None:
            self._fail_broken(stream, f"token {first} came without the requested logprobs")
            return None
        sample.num_received += count
        sample.pending.frombytes(data)
        return stream

    def _measure_load(self, num_tokens: int) -> None:
        now = asyncio.get_running_loop().time()
        if (seconds := now - self._rate_since) >= _LOAD_SECONDS:
            self._is_busy = self._num_tokens_since > self._limits.busy_tokens_per_second * seconds
            self._rate_since, self._num_tokens_since = now, 0
        self._num_tokens_since += num_tokens

    def _wake(self, stream: RequestStream) -> None:
        """Wakes a stream with a new token, in the next turn of the loop or after the time for merging."""
        if not self._is_busy:
            self._wake_soon(stream)
        elif stream not in self._waiting:
            self._waiting[stream] = asyncio.get_running_loop().time()
            self._schedule()

    def _wake_soon(self, stream: RequestStream) -> None:
        """Wakes a stream with a new token in the next turn of the loop, at any load."""
        if not self._ready:
            asyncio.get_running_loop().call_soon(self._wake_ready)
        self._ready[stream] = None

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
