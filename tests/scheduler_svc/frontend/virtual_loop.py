"""An event loop on simulated time: a sleep ends at once, and the clock then has the time that it names."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _NoWait(selectors.DefaultSelector):
    """Adds the time that a select would have waited to the loop's clock."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.seconds += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Counts from 0."""

    def __init__(self) -> None:
        self._clock = _NoWait()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.seconds


async def settle() -> None:
    """Lets other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on simulated time."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**given))

    return run
