"""Owns how the coroutine of a write runs: without a task, whose switch costs more than the write, or as a task."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

End = Callable[[BaseException | None], None]
Run = Callable[[Coroutine[Any, Any, None], End], None]

# The event loop itself keeps only weak references.
_tasks: set["asyncio.Task[None]"] = set()


def run_here(coroutine: Coroutine[Any, Any, None], on_end: End) -> None:
    """Runs it in the caller's turn, and then each future that it waits for continues it. `on_end` gets its error."""
    try:
        future = coroutine.send(None)
    except StopIteration:
        on_end(None)
    except (Exception, asyncio.CancelledError) as error:
        on_end(error)
    else:
        # As a task does: the future then knows that it is waited for.
        future._asyncio_future_blocking = False
        future.add_done_callback(functools.partial(_go_on, coroutine, on_end))


def _go_on(coroutine: Coroutine[Any, Any, None], on_end: End, _: object) -> None:
    run_here(coroutine, on_end)


def run_as_task(coroutine: Coroutine[Any, Any, None], on_end: End) -> None:
    """Runs it as a task, from the next turn on. `on_end` gets its error."""

    def end(ended: "asyncio.Task[None]") -> None:
        _tasks.discard(ended)
        on_end(asyncio.CancelledError() if ended.cancelled() else ended.exception())

    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(end)
