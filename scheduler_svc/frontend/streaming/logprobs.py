"""Owns logprobs on their way through the front end: reads the core's arrays, queues them, returns them by count.

Knows of the tokens that the logprobs belong to only what they add to the text. Logprobs enter and leave in the order of
their tokens, and always as many as tokens leave, so they stay aligned even if tokens are held back or cut off.
"""

import logging
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend.text.detokenize import Pieces

logger = logging.getLogger(__name__)

# A logprob; and an id and a logprob for each alternative.
BYTES_PER_LOGPROB = 4
BYTES_PER_TOP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """The core's logprobs of m tokens, with k alternatives for each."""

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
    """The rows in a message of the core. Raises ValueError if the sizes of its arrays disagree."""
    logprobs = np.frombuffer(message.logprobs, "<f4")
    shape = (len(logprobs), message.top_k)
    return LogprobRows(
        logprobs=logprobs,
        top_token_ids=np.frombuffer(message.top_token_ids, "<i4").reshape(shape),
        top_logprobs=np.frombuffer(message.top_logprobs, "<f4").reshape(shape),
    )


def read_step(output: frontend_pb2.StepOutput) -> tuple[LogprobRows | None, Mapping[int, int]]:
    """The step's logprobs and the row of each entry that has some."""
    if not output.HasField("logprobs"):
        return None, {}
    try:
        received = read(output.logprobs)
        entries = np.frombuffer(output.logprobs.entries, "<i4").tolist()
        return received, dict(zip(entries, range(len(received)), strict=True))
    except ValueError:
        logger.error("dropped a step's logprobs: the sizes of their arrays disagree")
        return None, {}


def add_pieces(logprobs: pb.Logprobs, token_ids: Iterable[int], pieces: Pieces, *, is_end: bool = False) -> None:
    """Adds what these tokens, and the alternatives of each, add to the text. `is_end`: the text ends with them."""
    top_k = logprobs.top_k
    for idx, token_id in enumerate(token_ids):
        for top_id in logprobs.top_token_ids[idx * top_k : (idx + 1) * top_k]:
            text, data = pieces.peek(top_id)
            logprobs.top_pieces.add(text=text, data=data)
        text, data = pieces.push(token_id)
        logprobs.pieces.add(text=text, data=data)
    if is_end:
        # A token that is left out of the text has a name and no bytes.
        last = next((piece for piece in reversed(logprobs.pieces) if piece.data or not piece.text), None)
        if last is not None:
            text, data = pieces.rest()
            last.text, last.data = last.text + text, last.data + data


class LogprobQueue:
    """Logprobs that were received and not sent, each with its `num_top` alternatives."""

    __slots__ = ("_logprobs", "_top_logprobs", "_top_token_ids", "bytes_each", "num_top")

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top
        self.bytes_each = BYTES_PER_LOGPROB + BYTES_PER_TOP * num_top
        self._logprobs = array("f")
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        return len(self._logprobs)

    @property
    def num_bytes(self) -> int:
        return len(self._logprobs) * self.bytes_each

    def put(self, received: LogprobRows, rows: slice) -> bool:
        """Appends these rows. Returns False if they have too few alternatives."""
        if received.top_k < self.num_top:
            return False
        self._logprobs.frombytes(received.logprobs[rows].astype("f4").tobytes())
        if self.num_top:
            self._top_token_ids.frombytes(received.top_token_ids[rows, : self.num_top].astype("i4").tobytes())
            self._top_logprobs.frombytes(received.top_logprobs[rows, : self.num_top].astype("f4").tobytes())
        return True

    def take(self, count: int) -> pb.Logprobs:
        """Removes and returns the logprobs of the first `count` tokens."""
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
    """Logprobs of the prompt's positions `start` to `end` - 1, which arrive in consecutive pieces."""

    __slots__ = ("_end", "_queue", "_start")

    def __init__(self, *, start: int, end: int, num_top: int) -> None:
        # The position of the first logprob in the queue.
        self._start = start
        self._end = end
        self._queue = LogprobQueue(num_top)

    @property
    def is_complete(self) -> bool:
        """Whether all have been received; some may not have been sent."""
        return self._next_position == self._end

    @property
    def _next_position(self) -> int:
        return self._start + len(self._queue)

    @property
    def num_bytes(self) -> int:
        return self._queue.num_bytes

    def put(self, start: int, received: LogprobRows) -> bool:
        """Appends the piece that begins at `start`. Returns False if another position was expected."""
        if start != self._next_position or start + len(received) > self._end:
            return False
        return self._queue.put(received, slice(None))

    def take(self, max_bytes: int) -> pb.PromptInfo | None:
        """Removes and returns the next logprobs, about `max_bytes` at most; None if there are none."""
        if not len(self._queue):
            return None
        count = min(len(self._queue), max(1, max_bytes // self._queue.bytes_each))
        info = pb.PromptInfo(start=self._start, logprobs=self._queue.take(count))
        self._start += count
        return info
