"""The two streams of a device: one computes, the other copies pages to and from host memory at the same time.

Work of one stream runs in the order in which it was enqueued. Only an event orders work of different streams. Knows
nothing of pages.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the work of a stream; `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Moves the event behind all work that is enqueued on the current stream."""
        ...

    def wait(self) -> None:
        """Lets later work of the current stream begin after the event; does nothing before the first `record`."""
        ...


class Streams(Protocol):
    """The compute stream, which is current unless `copying` is entered, and the copy stream."""

    def event(self) -> Event:
        """Returns a new event."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Makes the copy stream current."""
        ...


def streams_of(device: torch.device) -> Streams:
    """Returns the two streams of a GPU. On a CPU work has ended when its call returns, so there is nothing to order."""
    return _CudaStreams(device) if device.type == "cuda" else _NoStreams()


class _CudaStreams:
    def __init__(self, device: torch.device) -> None:
        # Torch's streams do not synchronise with the default stream, so only events order the two.
        self._copy = torch.cuda.Stream(device)

    def event(self) -> Event:
        return torch.cuda.Event()

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._copy)


class _NoStreams:
    def event(self) -> Event:
        return _NoEvent()

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()


class _NoEvent:
    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass
