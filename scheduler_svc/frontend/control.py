"""Owns ControlService: Abort, GetModelInfo, GetLoad, FlushCache. The core decides and knows.

Questions are matched to answers here. Knows nothing of streams. Questions in flight are bounded; GetLoad calls that
come together share one.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, control_pb2_grpc

from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.parsing import MAX_SMALL_BYTES
from scheduler_svc.frontend.validate import checks

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

MAX_ABORT_IDS = 1024
MAX_QUERIES = 1024
REPLY_SECONDS = 5.0

Reply = control_pb2.AbortResponse | control_pb2.GetLoadResponse | control_pb2.FlushCacheResponse


class CoreQueries:
    """Questions to the core that wait for their answers."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        self._send = send
        self._last_query = 0
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._load: asyncio.Task[Reply] | None = None

    async def abort(self, request_ids: list[str]) -> Reply:
        """Raises Refusal where the core does not answer."""
        abort = frontend_pb2.Abort(query=self._next(), request_ids=request_ids)
        return await self._ask(abort.query, frontend_pb2.FrontendToCore(abort=abort))

    async def flush_cache(self) -> Reply:
        """Raises Refusal where the core does not answer."""
        flush = frontend_pb2.FlushCache(query=self._next())
        return await self._ask(flush.query, frontend_pb2.FrontendToCore(flush_cache=flush))

    async def load(self) -> Reply:
        """Raises Refusal where the core does not answer."""
        if self._load is None or self._load.done():
            query = frontend_pb2.LoadQuery(query=self._next())
            message = frontend_pb2.FrontendToCore(load_query=query)
            self._load = asyncio.get_running_loop().create_task(self._ask(query.query, message))
            # Retrieved here too: all who asked may have left.
            self._load.add_done_callback(lambda task: task.cancelled() or task.exception())
        # A caller that leaves takes no answer away from the others.
        return await asyncio.shield(self._load)

    def answer(self, query: int, reply: Reply) -> None:
        """Late answers are dropped."""
        waiting = self._waiting.get(query)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self) -> None:
        """The core is gone."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_unreachable())

    def _next(self) -> int:
        self._last_query += 1
        return self._last_query

    async def _ask(self, query: int, message: frontend_pb2.FrontendToCore) -> Reply:
        if len(self._waiting) >= MAX_QUERIES:
            raise status.overloaded(f"{len(self._waiting)} questions wait for the core; the limit is {MAX_QUERIES}")
        waiting = self._waiting[query] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(message):
                raise _unreachable()
            async with asyncio.timeout(REPLY_SECONDS):
                return await waiting
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not answered for {REPLY_SECONDS:g} s") from None
        finally:
            del self._waiting[query]


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Answers operators."""

    def __init__(self, readiness: Readiness, queries: CoreQueries) -> None:
        self._readiness = readiness
        self._queries = queries

    def admit(self) -> int:
        """The most bytes of a request, of every method here."""
        return MAX_SMALL_BYTES

    async def Abort(
        self,
        request: control_pb2.AbortRequest,
        context: "ServicerContext[control_pb2.AbortRequest, control_pb2.AbortResponse]",
    ) -> control_pb2.AbortResponse:
        """Per id whether it was live; the streams themselves end with ABORTED."""
        if not 1 <= len(request.request_ids) <= MAX_ABORT_IDS:
            message = f"request_ids is {len(request.request_ids)} long; it must be between 1 and {MAX_ABORT_IDS}"
            raise status.invalid("request_ids", message)
        for idx, request_id in enumerate(request.request_ids):
            if not request_id:
                raise status.invalid(f"request_ids[{idx}]", f"request_ids[{idx}] is empty; an id is needed")
            checks.check_request_id(f"request_ids[{idx}]", request_id)
        reply = await self._queries.abort(list(dict.fromkeys(request.request_ids)))
        assert isinstance(reply, control_pb2.AbortResponse)
        outcomes = {result.request_id: result for result in reply.results}
        return control_pb2.AbortResponse(results=[outcomes[request_id] for request_id in request.request_ids])

    async def GetModelInfo(
        self,
        request: control_pb2.GetModelInfoRequest,
        context: "ServicerContext[control_pb2.GetModelInfoRequest, control_pb2.GetModelInfoResponse]",
    ) -> control_pb2.GetModelInfoResponse:
        """What is served, also while the service drains."""
        return self._readiness.model().info

    async def GetLoad(
        self,
        request: control_pb2.GetLoadRequest,
        context: "ServicerContext[control_pb2.GetLoadRequest, control_pb2.GetLoadResponse]",
    ) -> control_pb2.GetLoadResponse:
        """How busy the core is now, and why it does not serve; also before a worker has joined."""
        reply = await self._queries.load()
        assert isinstance(reply, control_pb2.GetLoadResponse)
        reply.not_serving = self._readiness.why_not_serving
        return reply

    async def FlushCache(
        self,
        request: control_pb2.FlushCacheRequest,
        context: "ServicerContext[control_pb2.FlushCacheRequest, control_pb2.FlushCacheResponse]",
    ) -> control_pb2.FlushCacheResponse:
        """Empties the prefix cache; returns how many pages were cached."""
        reply = await self._queries.flush_cache()
        assert isinstance(reply, control_pb2.FlushCacheResponse)
        return reply
