"""The way of one stream to a cell: which is tried first, which next, and when there is no other. Does no I/O."""

import time
import uuid
from collections.abc import Iterable, Sequence

from tandem.v1 import inference_pb2

from tandem_client.cells.router import Router
from tandem_client.errors import (
    AnswersTooSlowly,
    NotFound,
    NothingAnswers,
    QueueFull,
    RateLimited,
    TandemError,
    Unavailable,
)
from tandem_client.wire.routing import AFFINITY_KEY, affinity_of

Metadata = Sequence[tuple[str, str]]


def may_go_elsewhere(error: TandemError) -> bool:
    """Whether no cell can have accepted the request, and another one may.

    Nobody answered, or the service itself refused: it has no worker, is stopping, or its queue is full. A connection
    that broke says neither, and a limit per minute is meant for the caller.
    """
    if isinstance(error, RateLimited):
        return False
    if isinstance(error, NothingAnswers | AnswersTooSlowly):
        return True
    return isinstance(error, Unavailable | QueueFull) and error.is_refusal


class GenerateWay:
    """Of a request: cells by its affinity, each once, until one accepts it."""

    def __init__(
        self, router: Router, request: inference_pb2.GenerateRequest, metadata: Iterable[tuple[str, str]]
    ) -> None:
        """Gives the request an id, by which its cell is remembered."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        self._router, self._id = router, request.request_id
        self._key = dict(metadata).get(AFFINITY_KEY) or affinity_of(request)
        self._tried: list[int] = []
        # The cell that counts the request: one entry or none, so that two threads cannot take it twice.
        self._counted: list[int] = []

    def next_cell(self) -> int | None:
        """The cell to try; None if all were."""
        chosen = self._router.choose(self._key, self._id, time.monotonic(), self._tried)
        if chosen is not None:
            self._tried.append(chosen)
            self._counted.append(chosen)
        return chosen

    def began(self) -> None:
        """The cell has answered."""

    def goes_on(self, error: TandemError) -> bool:
        """Whether another cell may be tried after this error, before which nothing was answered."""
        self.ended()
        if not may_go_elsewhere(error):
            return False
        if isinstance(error, Unavailable):
            self._router.failed(self._tried[-1], time.monotonic())
        return True

    def ended(self) -> None:
        """The stream is over; may be called again."""
        try:
            self._router.ended(self._counted.pop())
        except IndexError:
            return


class ResumeWay:
    """Of a stream that is continued: the cell that has it, or one after the other if that is not known."""

    def __init__(self, router: Router, num_cells: int, request: inference_pb2.ResumeRequest) -> None:
        self._router, self._id = router, request.request_id
        known = router.cell_of(self._id)
        self._left = list(range(num_cells)) if known is None else [known]
        self._cell = -1

    def next_cell(self) -> int | None:
        """The cell to try; None if all were."""
        if not self._left:
            return None
        self._cell = self._left.pop(0)
        return self._cell

    def began(self) -> None:
        """The cell has answered, so it has the request."""
        self._router.remember(self._id, self._cell)

    def goes_on(self, error: TandemError) -> bool:
        """Whether another cell may have the request."""
        return isinstance(error, NotFound | Unavailable)

    def ended(self) -> None:
        """Nothing is counted."""


def worst(errors: Sequence[BaseException], read: Sequence[TandemError]) -> BaseException:
    """Of the errors of all cells, the one that tells most: a refusal with a retry time first, NotFound last."""

    def tells(place: int) -> int:
        error = read[place]
        if isinstance(error, NotFound):
            return 0
        return 1 + error.is_refusal + 2 * (error.retry_after_seconds is not None)

    return errors[max(range(len(errors)), key=tells)]
