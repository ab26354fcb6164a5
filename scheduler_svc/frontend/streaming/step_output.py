"""Owns the reading of the core's StepOutputs: passes tokens, logprobs and ends to the samples of open streams.

`wakeups` decides when a stream's handler sees new tokens: it never delays first tokens and ends. A stream whose tokens
do not follow each other is reported as broken.
"""

import logging
from collections.abc import Callable, Mapping

import numpy as np
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.streaming import logprobs
from scheduler_svc.frontend.streaming.arrivals import SampleTokens
from scheduler_svc.frontend.streaming.limits import StreamLimits
from scheduler_svc.frontend.streaming.stream import RequestStream, SampleStream
from scheduler_svc.frontend.streaming.wakeups import Wakeups

logger = logging.getLogger(__name__)


class StepOutputReader:
    """`samples` has the samples of all open streams; `fail_broken` ends a stream with the message of an error."""

    def __init__(
        self,
        samples: Mapping[int, SampleStream],
        limits: StreamLimits,
        fail_broken: Callable[[RequestStream, str], None],
    ) -> None:
        self._samples = samples
        self._fail_broken = fail_broken
        self._wakeups = Wakeups(limits, self._pass_on)

    def forget(self, stream: RequestStream) -> None:
        """Drops a stream that is closed."""
        self._wakeups.forget(stream)

    def release(self) -> None:
        """Passes on every output that is kept."""
        self._wakeups.release()

    def read(self, output: frontend_pb2.StepOutput) -> None:
        """Passes a step's tokens and ends to their streams. Drops those of closed streams."""
        num_tokens = len(output.tokens) // 4
        num_bytes = (len(output.streams), len(output.offsets), len(output.tokens))
        if num_bytes != (8 * num_tokens, 4 * num_tokens, 4 * num_tokens):
            logger.error("dropped a step's output: its arrays differ in length")
            return
        self._wakeups.measure_load(num_tokens)
        if self._wakeups.hold(output):
            return
        self._wakeups.release()
        for piece in output.prompt_logprobs:
            self._put_prompt_logprobs(piece)
        received, row_of_entry = logprobs.read_step(output)
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
                self._wakeups.wake(stream)
            else:
                self._wakeups.wake_soon(stream)
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
            fits = stream.prompt is not None and stream.prompt.put(piece.start, logprobs.read(piece))
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
            expected = f"{count} tokens from {sample.num_received} on, of {stream.max_new_tokens}"
            self._fail_broken(stream, f"{count} tokens from {first} on came instead of {expected}")
            return None
        if sample.logprobs is not None:
            self._fail_broken(stream, f"token {first} came without the requested logprobs")
            return None
        sample.num_received += count
        sample.pending.frombytes(data)
        return stream
