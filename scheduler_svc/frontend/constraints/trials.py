"""Which grammar is tried next, for whom, and the answers of earlier trials. Owns the process that tries them.

One grammar is tried at a time. The tenant that has used the least time of the process goes first (start-time fair
queueing, as in `text/fair_threads`), so a tenant with slow grammars delays another's by one of its own at most. Equal
grammars share one trial, and a result is kept by the grammar's hash.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.frontend.constraints.trial_process import TrialProcess, TrialUnusable, Verdict
from scheduler_svc.frontend.rpc import status
from tandem_contract.grammars import COMPILE_SECONDS

MAX_KEPT = 1_024
# Of one tenant.
MAX_WAITING = 8


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """A grammar that waits or is tried."""

    name: bytes
    grammar: str
    tenant: str
    done: "asyncio.Future[Verdict]"
    # Callers that wait for it.
    num_callers: int = 0


class Trials:
    """The trials for one model."""

    def __init__(self, process: TrialProcess, *, clock: Callable[[], float], on_end: Callable[[Verdict], None]) -> None:
        """`clock` returns seconds that never go back. `on_end` gets the verdict of each trial."""
        self._process = process
        self._clock, self._on_end = clock, on_end
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._by_name: dict[bytes, _Entry] = {}
        # In order of arrival, by tenant.
        self._waiting: dict[str, deque[_Entry]] = {}
        # Seconds of the process that each tenant has used, counted from the time that all had used the same.
        self._used: dict[str, float] = {}
        self._least = 0.0
        self._task: asyncio.Task[None] | None = None

    async def judge(self, name: bytes, grammar: str, tenant: str) -> Verdict:
        """Returns the verdict on a grammar, whose hash is `name`. Raises Refusal if too many of the tenant wait."""
        kept = self._kept.get(name)
        if kept is not None:
            self._kept.move_to_end(name)
            return kept
        entry = self._by_name.get(name) or self._enqueue(name, grammar, tenant)
        entry.num_callers += 1
        try:
            return await asyncio.shield(entry.done)
        finally:
            entry.num_callers -= 1

    def close(self) -> None:
        """Ends the process; what waits is refused."""
        if self._task is not None:
            self._task.cancel()
        for entry in self._by_name.values():
            if not entry.done.done():
                entry.done.set_exception(status.not_ready("the model is not served any more"))
                # Its callers may all have gone.
                entry.done.exception()
        self._process.close()

    def _enqueue(self, name: bytes, grammar: str, tenant: str) -> _Entry:
        waiting = self._waiting.get(tenant, ())
        if len(waiting) >= MAX_WAITING:
            what = f"{len(waiting)} new constraints of the caller wait for their trial; the limit is {MAX_WAITING}"
            raise status.overloaded(what, COMPILE_SECONDS)
        done: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        entry = self._by_name[name] = _Entry(name=name, grammar=grammar, tenant=tenant, done=done)
        if tenant not in self._waiting:
            self._used[tenant] = max(self._used.get(tenant, 0.0), self._least)
        self._waiting.setdefault(tenant, deque()).append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return entry

    def _next(self) -> _Entry | None:
        while self._waiting:
            tenant = min(self._waiting, key=lambda each: self._used[each])
            of_tenant = self._waiting[tenant]
            entry = of_tenant.popleft()
            if not of_tenant:
                del self._waiting[tenant]
            if entry.num_callers:
                self._least = max(self._least, self._used[tenant])
                return entry
            del self._by_name[entry.name]
        return None

    async def _serve(self) -> None:
        """Tries grammars until none waits."""
        while (entry := self._next()) is not None:
            begun = self._clock()
            try:
                verdict = await self._process.judge(entry.grammar)
            except TrialUnusable as reason:
                verdict = Verdict(refusal=f"constraints cannot be tried: {reason}", is_unknown=True)
            self._used[entry.tenant] += self._clock() - begun
            self._on_end(verdict)
            if not verdict.is_unknown:
                self._kept[entry.name] = verdict
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            del self._by_name[entry.name]
            if not entry.done.done():
                entry.done.set_result(verdict)
