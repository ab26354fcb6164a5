"""Owns logprobs on their way through the front end: read from the core's arrays, kept in line, given out by count.

Knows nothing of the tokens that they belong to: they come in the tokens' order and leave in it, as many at a time as
tokens do. So they stay aligned, whatever is held back or cut off.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

# A logprob; and of each alternative an id and a logprob.
BYTES_PER_LOGPROB = 4
BYTES_PER_TOP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """What the core tells of m tokens."""

    # float32[m].
    logprobs: NDArray[np.float32]
    # int32[m, k] and float32[m, k].
    top_token_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    @property
    def top_k(self) -> int:
        return self.top_token_ids.shape[1]

    def __len__(self) -> int:
        return len(self.logprobs)


def read(message: frontend_pb2.TokenLogprobs | frontend_pb2.PromptLogprobs) -> LogprobRows:
    """Raises ValueError where the arrays do not fit together."""
    logprobs = np.frombuffer(message.logprobs, "<f4")
    shape = (len(logprobs), message.top_k)
    return LogprobRows(
        logprobs=logprobs,
        top_token_ids=np.frombuffer(message.top_token_ids, "<i4").reshape(shape),
        top_logprobs=np.frombuffer(message.top_logprobs, "<f4").reshape(shape),
    )


class LogprobQueue:
    """Logprobs that came and were not given out, each with its `num_top` alternatives."""

    __slots__ = ("_logprobs", "_top_logprobs", "_top_token_ids", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self._logprobs = array("f")
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._logprobs)

    @property
    def num_bytes(self) -> int:
        return len(self._logprobs) * (BYTES_PER_LOGPROB + BYTES_PER_TOP * self.num_top)

    def put(self, told: LogprobRows, rows: slice) -> bool:
        """Takes in these rows' logprobs; False where they have too few alternatives."""
        if told.top_k < self.num_top:
            return False
        self._logprobs.frombytes(told.logprobs[rows].astype("f4").tobytes())
        if self.num_top:
            self._top_token_ids.frombytes(told.top_token_ids[rows, : self.num_top].astype("i4").tobytes())
            self._top_logprobs.frombytes(told.top_logprobs[rows, : self.num_top].astype("f4").tobytes())
        return True

    def take(self, count: int) -> pb.Logprobs:
        """Those of the first `count` tokens."""
        num_top = count * self.num_top
        message = pb.Logprobs(
            logprobs=self._logprobs[:count],
            top_k=self.num_top,
            top_token_ids=self._top_token_ids[:num_top],
            top_logprobs=self._top_logprobs[:num_top],
        )
        del self._logprobs[:count], self._top_token_ids[:num_top], self._top_logprobs[:num_top]
        return message


class PromptQueue:
    """The same of the prompt's positions `start` to `end` - 1, which come in pieces."""

    __slots__ = ("_end", "_queue", "_start")

    def __init__(self, *, start: int, end: int, num_top: int) -> None:
        self._start = start
        self._end = end
        self._queue = LogprobQueue(num_top)

    @property
    def is_complete(self) -> bool:
        """All have come; they may not all be given out."""
        return self._due == self._end

    @property
    def _due(self) -> int:
        return self._start + len(self._queue)

    @property
    def num_bytes(self) -> int:
        return self._queue.num_bytes

    def put(self, start: int, told: LogprobRows) -> bool:
        """Takes in the piece that begins at `start`; False where another was due."""
        if start != self._due or start + len(told) > self._end:
            return False
        return self._queue.put(told, slice(None))

    def take(self, max_bytes: int) -> pb.PromptInfo | None:
        """The next of them, about `max_bytes` at most; None where there are none."""
        if not len(self._queue):
            return None
        bytes_each = BYTES_PER_LOGPROB + BYTES_PER_TOP * self._queue.num_top
        count = min(len(self._queue), max(1, max_bytes // bytes_each))
        info = pb.PromptInfo(start=self._start, logprobs=self._queue.take(count))
        self._start += count
        return info
