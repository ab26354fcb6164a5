"""Owns ControlService. The core decides; this module asks it and waits.

Knows nothing of streams. Matches replies to queries, limits the queries in flight, and lets concurrent GetLoad calls
share one query.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, control_pb2_grpc

from scheduler_svc.door.tenant import Right
from scheduler_svc.frontend.door.entrance import caller
from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import MAX_ABORT_IDS, MAX_QUARANTINE_KEYS, QUARANTINE_KEY_CHARS, told
from scheduler_svc.frontend.validate import check_request_id
from scheduler_svc.frontend.watches.drains import DrainWatches
from scheduler_svc.frontend.watches.weights import WeightsWatches

MAX_QUERIES = 1024
REPLY_SECONDS = 5.0


Reply = frontend_pb2.AbortReply | frontend_pb2.LoadReply | frontend_pb2.FlushReply | frontend_pb2.QuarantineReply


class CoreQueries:
    """Queries to the core that wait for their replies. Every query raises Refusal if the core does not reply."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._load: asyncio.Task[frontend_pb2.LoadReply] | None = None

    async def ask(self, message: frontend_pb2.FrontendToCore) -> Any:
        """Sends the query in `message` and returns its reply."""
        if len(self._waiting) >= MAX_QUERIES:
            raise status.overloaded(f"{len(self._waiting)} queries wait for the core; the limit is {MAX_QUERIES}")
        query = next(self._ids)
        getattr(message, str(message.WhichOneof("message"))).query = query
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

    async def load(self) -> frontend_pb2.LoadReply:
        """Returns the core's load. Calls that overlap share one query."""
        if self._load is None or self._load.done():
            message = frontend_pb2.FrontendToCore(load_query=frontend_pb2.LoadQuery())
            self._load = asyncio.create_task(self.ask(message))
            # Retrieves the exception here too, because every caller may have left.
            self._load.add_done_callback(lambda task: task.cancelled() or task.exception())
        # If one caller leaves, the others still get the reply.
        return await asyncio.shield(self._load)

    def answer(self, reply: Reply) -> None:
        """Passes a reply to its query. Drops it if the query no longer waits."""
        waiting = self._waiting.get(reply.query)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def fail_all(self) -> None:
        """Fails every query, because the core is gone."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_unreachable())


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Serves operators: inspects the service and controls it."""

    def __init__(
        self,
        readiness: Readiness,
        queries: CoreQueries,
        drains: DrainWatches,
        updates: WeightsWatches,
        *,
        max_message_bytes: int,
    ) -> None:
        self._readiness = readiness
        self._queries = queries
        self._drains, self._updates = drains, updates
        self._max_message_bytes = max_message_bytes

    async def Abort(self, request: control_pb2.AbortRequest, context: Any) -> control_pb2.AbortResponse:
        """Returns for each id whether it was live. The streams themselves end with ABORTED.

        The ids are the caller's own. With the right of control, `tenant/id` means another tenant's request.
        """
        if not 1 <= len(request.request_ids) <= MAX_ABORT_IDS:
            message = f"request_ids is {len(request.request_ids)} long; it must be between 1 and {MAX_ABORT_IDS}"
            raise status.invalid("request_ids", message)
        for idx, request_id in enumerate(request.request_ids):
            if not request_id:
                raise status.invalid(f"request_ids[{idx}]", f"request_ids[{idx}] is empty; an id is needed")
            check_request_id(f"request_ids[{idx}]", request_id)
        ids, who = list(dict.fromkeys(request.request_ids)), caller()
        abort = frontend_pb2.Abort(request_ids=ids, tenant=who.tenant, all_tenants=Right.CONTROL in who.rights)
        reply = await self._queries.ask(frontend_pb2.FrontendToCore(abort=abort))
        outcomes = {request_id: result.outcome for request_id, result in zip(ids, reply.results, strict=True)}
        results = [control_pb2.AbortResult(request_id=each, outcome=outcomes[each]) for each in request.request_ids]
        return control_pb2.AbortResponse(results=results)

    async def GetCaller(self, request: control_pb2.GetCallerRequest, context: Any) -> control_pb2.GetCallerResponse:
        """Returns the tenant and the rights of the caller."""
        who = caller()
        return control_pb2.GetCallerResponse(tenant=who.tenant, rights=sorted(who.rights))

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Any
    ) -> control_pb2.GetModelInfoResponse:
        """Returns the served model, its limits for this caller and its defaults, also while the service drains."""
        model = self._readiness.model()
        info = control_pb2.GetModelInfoResponse()
        info.CopyFrom(model.info)
        limits = told(model.sizes, caller().limits, max_message_bytes=self._max_message_bytes)
        info.limits.CopyFrom(limits)
        return info

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Any) -> control_pb2.GetLoadResponse:
        """Returns the core's load and why no request is computed, also before a worker has joined."""
        load = (await self._queries.load()).load
        if (why := self._readiness.not_serving) is not None:
            load.not_serving, load.not_serving_reason = why.message, why.reason
            load.not_serving_since = self._readiness.since
        return load

    async def FlushCache(self, request: control_pb2.FlushCacheRequest, context: Any) -> control_pb2.FlushCacheResponse:
        """Empties the prefix cache and returns how many pages were cached."""
        reply = await self._queries.ask(frontend_pb2.FrontendToCore(flush_cache=frontend_pb2.FlushCache()))
        return control_pb2.FlushCacheResponse(pages=reply.pages)

    async def ListQuarantine(
        self, request: control_pb2.ListQuarantineRequest, context: Any
    ) -> control_pb2.ListQuarantineResponse:
        """Returns the requests that are refused, without their content."""
        query = frontend_pb2.FrontendToCore(quarantine_query=frontend_pb2.QuarantineQuery())
        reply = await self._queries.ask(query)
        return control_pb2.ListQuarantineResponse(requests=reply.requests)

    async def ClearQuarantine(
        self, request: control_pb2.ClearQuarantineRequest, context: Any
    ) -> control_pb2.ClearQuarantineResponse:
        """Ends the quarantine of the requests with these keys, or of all, and returns how many they were."""
        if len(request.keys) > MAX_QUARANTINE_KEYS:
            raise status.invalid("keys", f"keys is {len(request.keys)} long; the limit is {MAX_QUARANTINE_KEYS}")
        for idx, key in enumerate(request.keys):
            if len(key) != QUARANTINE_KEY_CHARS:
                message = f"keys[{idx}] has {len(key)} characters; a key has {QUARANTINE_KEY_CHARS}"
                raise status.invalid(f"keys[{idx}]", message)
        clear = frontend_pb2.ClearQuarantine(keys=request.keys)
        reply = await self._queries.ask(frontend_pb2.FrontendToCore(clear_quarantine=clear))
        return control_pb2.ClearQuarantineResponse(removed=reply.removed)

    # A coroutine that writes, like every streaming method of the front end.
    async def Drain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.DrainRequest, context: Any
    ) -> None:
        """Drains a worker or the service, and writes the progress until the end."""
        await self._drains.serve(request, context)

    async def UpdateWeights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.UpdateWeightsRequest, context: Any
    ) -> None:
        """Lets all workers load new weights, and writes the progress until the end."""
        await self._updates.serve(request, context)
