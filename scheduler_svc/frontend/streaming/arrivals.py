"""Owns the outputs of steps that arrived under load and are not in their streams yet, and sorts them by sample.

Knows nothing of streams. A loop over the tokens of a step costs half a microsecond per token; sorted by numpy, the
tokens of several steps cost one microsecond per sample.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import frontend_pb2

TOKEN_BYTES = 4
# The id of a sample, the offset of its first token, the number of tokens, whether their offsets are consecutive, and
# the tokens as int32 of this machine.
SampleTokens = tuple[int, int, int, bool, bytes]


class Arrivals:
    """Tokens of several steps, in order of arrival."""

    __slots__ = ("_offsets", "_streams", "_tokens", "since")

    def __init__(self) -> None:
        # The time at which the oldest token arrived.
        self.since = 0.0
        self._streams: list[NDArray[np.uint64]] = []
        self._offsets: list[NDArray[np.int32]] = []
        self._tokens: list[NDArray[np.int32]] = []

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def add(self, output: frontend_pb2.StepOutput, now: float) -> bool:
        """Keeps a step's tokens. Returns False if it may not wait: it has a first token, or more than tokens."""
        if output.ends or output.prompt_logprobs or output.HasField("logprobs") or not output.tokens:
            return False
        offsets = np.frombuffer(output.offsets, "<i4")
        if not offsets.all():
            return False
        if not self._tokens:
            self.since = now
        self._streams.append(np.frombuffer(output.streams, "<u8"))
        self._offsets.append(offsets)
        self._tokens.append(np.frombuffer(output.tokens, "<i4"))
        return True

    def take(self) -> Iterator[SampleTokens]:
        """Removes all tokens. Yields those of one sample after another."""
        streams, offsets, tokens = map(np.concatenate, (self._streams, self._offsets, self._tokens))
        self._streams, self._offsets, self._tokens = [], [], []
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
            yield sample_id, first, end - start, not broken, data[TOKEN_BYTES * start : TOKEN_BYTES * end]
