"""Owns the threads that tokenize long texts, and who gets them next. Knows nothing of texts.

The tenant that has used the least CPU time gets the next free thread: start-time fair queueing (Goyal, Vin and Cheng,
1996) with the time that a piece of work took, measured in its thread, so costs need not be known in advance. A tenant
gets no credit for idle time. Work that runs is not interrupted.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import thread_time
from typing import Any, TypeVar

from scheduler_svc.frontend.rpc import status

Result = TypeVar("Result")


class FairThreads:
    """`num_threads` threads. At most `max_waiting` pieces of work wait for them, `what` in an error."""

    def __init__(self, num_threads: int, max_waiting: int, what: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")
        self._num_free = num_threads
        self._max_waiting = max_waiting
        self._what = what
        # In order of arrival, by tenant.
        self._waiting: dict[str, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        # CPU seconds of each tenant that ever had a long text, counted from the time that all had used the same.
        self.used: dict[str, float] = {}
        # What the tenant had used that got the last thread: a tenant that comes back starts here.
        self._least = 0.0

    async def run(self, tenant: str, work: Callable[[], Result]) -> Result:
        """Returns the result of the work. Raises Refusal (RESOURCE_EXHAUSTED) if too much waits.

        A tenant may have as many waiting as there are free places, so one with the most leaves room for others.
        """
        own, free = len(self._waiting.get(tenant, ())), self._max_waiting - sum(map(len, self._waiting.values()))
        if self._num_free == 0 and own >= free:
            raise status.overloaded(f"{own} {self._what} of the caller wait; the limit is {free}, as many as are free")
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if tenant not in self._waiting:
            self.used[tenant] = max(self.used.get(tenant, 0.0), self._least)
        self._waiting.setdefault(tenant, deque()).append((done, work))
        self._start()
        return await done

    def close(self) -> None:
        """Starts nothing more. What runs is completed, and what waits is refused."""
        for of_tenant in self._waiting.values():
            for done, _ in of_tenant:
                if not done.done():
                    done.set_exception(status.not_ready("the model is not served any more"))
        self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _start(self) -> None:
        while self._num_free and self._waiting:
            tenant = min(self._waiting, key=lambda each: self.used[each])
            of_tenant = self._waiting[tenant]
            done, work = of_tenant.popleft()
            if not of_tenant:
                del self._waiting[tenant]
            # The caller of a cancelled task is gone.
            if not done.done():
                self._least = max(self._least, self.used[tenant])
                self._num_free -= 1
                running = asyncio.get_running_loop().run_in_executor(self._threads, _timed, work)
                running.add_done_callback(lambda ended, tenant=tenant, done=done: self._end(tenant, done, ended))

    def _end(self, tenant: str, done: "asyncio.Future[Any]", ended: "asyncio.Future[tuple[Any, float]]") -> None:
        self._num_free += 1
        if ended.cancelled():
            done.cancel()
        elif error := ended.exception():
            if not done.done():
                done.set_exception(error)
        else:
            result, seconds = ended.result()
            self.used[tenant] += seconds
            if not done.done():
                done.set_result(result)
        self._start()


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begun = thread_time()
    result = work()
    return result, thread_time() - begun
