"""Owns ControlService. The core decides; this module asks it and waits.

Knows nothing of streams. Matches replies to queries, limits the queries in flight, and lets concurrent GetLoad calls
share one query.

Owns the calls of operators that watch something which goes on in the core: drains, updates of weights. It keeps only
the newest report of each call, so a caller that reads slowly delays nobody. What is watched goes on if its caller
leaves.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, control_pb2_grpc

from scheduler_svc.core.messages.names import meant
from scheduler_svc.door.tenant import Caller, Right
from scheduler_svc.frontend import listing
from scheduler_svc.frontend.entrance import caller
from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import (
    MAX_ABORT_IDS,
    MAX_DRAIN_SECONDS,
    MAX_FOLDER_CHARS,
    MAX_NAMED_ID_CHARS,
    MAX_QUARANTINE_KEYS,
    MAX_UPDATE_SECONDS,
    MAX_VERSION_CHARS,
    MAX_WORKER_NAME_CHARS,
    QUARANTINE_KEY_CHARS,
    told,
)
from scheduler_svc.frontend.validate import check_request_id
from tandem_contract.plural import numbered

REPLY_SECONDS = 5.0

# Sends a message to the core; returns False without one.
Send = Callable[[frontend_pb2.FrontendToCore], bool]


@dataclass(slots=True, eq=False)
class _Watch:
    """One call. `reply` is the newest one that was not written; `is_lost`: no other will come."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Any = None
    is_lost: bool = False


class Watches:
    """The calls of one method. Replies have `query`, `progress` with a `state`, `refusal` and `message`."""

    def __init__(
        self, send: Send, name: str, *, final: Collection[Any], not_found: grpc.StatusCode, field: str = ""
    ) -> None:
        """`name` is that of the message to the core in FrontendToCore. `final` has the states that end a call.

        `not_found`: the status if the core does not find what is meant. `field`: the one at fault if replies name none.
        """
        self._send, self._name, self._final = send, name, final
        self._not_found, self._field = not_found, field
        self._ids = itertools.count(1)
        self._watches: dict[int, _Watch] = {}

    async def serve(self, request: Any, context: Any) -> None:
        """Handles one call, whose request was checked. Raises Refusal."""
        query = next(self._ids)
        watch = self._watches[query] = _Watch()
        is_over = False
        try:
            if not self._ask(query, request):
                raise _unreachable()
            while not is_over:
                reply = await self._next(watch)
                is_over = bool(reply.message) or reply.progress.state in self._final
                if reply.message:
                    raise self._refusal(reply)
                await context.write(reply.progress)
        finally:
            del self._watches[query]
            if not is_over:
                self._ask(query, None)

    def _ask(self, query: int, request: Any) -> bool:
        """Sends the query to the core, or that its caller has left. Returns False without a core."""
        message = frontend_pb2.FrontendToCore()
        asked = getattr(message, self._name)
        asked.query, asked.stop_replies = query, request is None
        if request is not None:
            asked.request.CopyFrom(request)
        return self._send(message)

    def answer(self, reply: Any) -> None:
        """Passes a reply to its call. Drops it if the call has ended."""
        watch = self._watches.get(reply.query)
        if watch is not None:
            watch.reply = reply
            watch.changed.set()

    def fail_all(self) -> None:
        """Fails every call, because the core is gone. What it reported last is written before."""
        for watch in self._watches.values():
            watch.is_lost = True
            watch.changed.set()

    def _refusal(self, reply: Any) -> status.Refusal:
        match reply.refusal:
            case frontend_pb2.REJECT_CODE_NOT_FOUND:
                return status.Refusal(self._not_found, reply.message)
            case frontend_pb2.REJECT_CODE_INVALID:
                return status.invalid(self._field or reply.field, reply.message)
            case frontend_pb2.REJECT_CODE_DUPLICATE:
                return status.Refusal(grpc.StatusCode.ALREADY_EXISTS, reply.message)
            case frontend_pb2.REJECT_CODE_QUEUE_FULL:
                return status.overloaded(reply.message)
            case frontend_pb2.REJECT_CODE_NOT_READY:
                return status.not_ready(reply.message)
            case _:
                return status.internal(reply.message)

    async def _next(self, watch: _Watch) -> Any:
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                await watch.changed.wait()
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not reported for {REPLY_SECONDS:g} s") from None
        watch.changed.clear()
        reply, watch.reply = watch.reply, None
        if reply is None:
            raise _unreachable()
        if watch.is_lost:
            watch.changed.set()
        return reply


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")


def check_drain(request: control_pb2.DrainRequest) -> None:
    """Raises Refusal if a field is out of bounds."""
    # Also false for NaN.
    if not 0 <= request.max_seconds <= MAX_DRAIN_SECONDS:
        message = f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_DRAIN_SECONDS}"
        raise status.invalid("max_seconds", message)
    if len(request.worker) > MAX_WORKER_NAME_CHARS:
        message = f"worker has {len(request.worker)} characters; the limit is {MAX_WORKER_NAME_CHARS}"
        raise status.invalid("worker", message)


def drain_watches(send: Send) -> Watches:
    """Returns the calls of Drain."""
    final = (
        control_pb2.DRAIN_STATE_DONE,
        control_pb2.DRAIN_STATE_TIME_LIMIT,
        control_pb2.DRAIN_STATE_WORKER_LOST,
    )
    return Watches(send, "drain", final=final, not_found=grpc.StatusCode.NOT_FOUND, field="worker")


def check_update(request: control_pb2.UpdateWeightsRequest) -> None:
    """Raises Refusal if a field is out of bounds. The core checks the folder."""
    # Also false for NaN.
    if not 0 <= request.max_seconds <= MAX_UPDATE_SECONDS:
        message = f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_UPDATE_SECONDS}"
        raise status.invalid("max_seconds", message)
    limits = (("version", request.version, MAX_VERSION_CHARS), ("folder", request.folder, MAX_FOLDER_CHARS))
    for name, text, most in limits:
        if len(text) > most:
            raise status.invalid(name, f"{name} has {len(text)} characters; the limit is {most}")
    for name, text, _ in limits:
        if not text or not text.isprintable():
            raise status.invalid(name, f"{name} is {text!r}; it must not be empty or contain control characters")
    if request.running not in control_pb2.RunningRequests.values():
        known = len(control_pb2.RunningRequests.values()) - 1
        raise status.invalid("running", f"running is {request.running}; it must be between 0 and {known}")


def update_watches(send: Send) -> Watches:
    """Returns the calls of UpdateWeights."""
    final = (
        control_pb2.UPDATE_STATE_DONE,
        control_pb2.UPDATE_STATE_REFUSED,
        control_pb2.UPDATE_STATE_TIME_LIMIT,
        control_pb2.UPDATE_STATE_INCOMPLETE,
    )
    # NOT_FOUND of the core: the service has no such method unless it was started with it.
    return Watches(send, "update_weights", final=final, not_found=grpc.StatusCode.PERMISSION_DENIED)


MAX_QUERIES = 1024
Reply = (
    frontend_pb2.AbortReply
    | frontend_pb2.LoadReply
    | frontend_pb2.FlushReply
    | frontend_pb2.QuarantineReply
    | frontend_pb2.RequestsReply
)


class CoreQueries:
    """Queries to the core that wait for their replies. Every query raises Refusal if the core does not reply."""

    def __init__(self, send: Send) -> None:
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


_NOT_FOUND = control_pb2.ABORT_OUTCOME_NOT_FOUND


def _looked_for(request_id: str, who: Caller) -> str:
    """Returns a sentence about the names under which no request was found."""
    tried = meant(request_id, who.tenant, all_tenants=Right.CONTROL in who.rights)
    return f"no waiting or running request has the id {' or '.join(map(repr, tried))}"


@dataclass(eq=False)
class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Serves operators: inspects the service and controls it."""

    readiness: Readiness
    queries: CoreQueries
    drains: Watches
    updates: Watches
    max_message_bytes: int = field(kw_only=True)
    _turns: listing.Turns = field(default_factory=listing.Turns, init=False)

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
            check_request_id(f"request_ids[{idx}]", request_id, MAX_NAMED_ID_CHARS)
        ids, who = list(dict.fromkeys(request.request_ids)), caller()
        abort = frontend_pb2.Abort(request_ids=ids, tenant=who.tenant, all_tenants=Right.CONTROL in who.rights)
        reply = await self.queries.ask(frontend_pb2.FrontendToCore(abort=abort))
        results = {
            request_id: control_pb2.AbortResult(
                request_id=request_id,
                outcome=result.outcome,
                detail=_looked_for(request_id, who) if result.outcome == _NOT_FOUND else "",
            )
            for request_id, result in zip(ids, reply.results, strict=True)
        }
        return control_pb2.AbortResponse(results=[results[each] for each in request.request_ids])

    async def ListRequests(
        self, request: control_pb2.ListRequestsRequest, context: Any
    ) -> control_pb2.ListRequestsResponse:
        """Returns a page of the requests that the caller may see: its tenant's, or all with the right of control."""
        who = caller()
        message = frontend_pb2.FrontendToCore(requests_query=listing.query_of(request, who))
        async with self._turns.turn(who.tenant):
            reply = await self.queries.ask(message)
        return listing.page_of(reply, who)

    async def GetCaller(self, request: control_pb2.GetCallerRequest, context: Any) -> control_pb2.GetCallerResponse:
        """Returns the tenant and the rights of the caller."""
        who = caller()
        return control_pb2.GetCallerResponse(tenant=who.tenant, rights=sorted(who.rights))

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Any
    ) -> control_pb2.GetModelInfoResponse:
        """Returns the served model, its limits for this caller and its defaults, also while the service drains."""
        model = self.readiness.model()
        info = control_pb2.GetModelInfoResponse()
        info.CopyFrom(model.info)
        limits = told(model.sizes, caller().limits, max_message_bytes=self.max_message_bytes)
        info.limits.CopyFrom(limits)
        return info

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: Any) -> control_pb2.GetLoadResponse:
        """Returns the core's load and why no request is computed, also before a worker has joined."""
        load = (await self.queries.load()).load
        if (why := self.readiness.not_serving) is not None:
            load.not_serving, load.not_serving_reason = why.message, why.reason
            load.not_serving_since = self.readiness.since
        return load

    async def FlushCache(self, request: control_pb2.FlushCacheRequest, context: Any) -> control_pb2.FlushCacheResponse:
        """Empties the prefix cache and returns how many pages were cached."""
        reply = await self.queries.ask(frontend_pb2.FrontendToCore(flush_cache=frontend_pb2.FlushCache()))
        return control_pb2.FlushCacheResponse(pages=reply.pages)

    async def ListQuarantine(
        self, request: control_pb2.ListQuarantineRequest, context: Any
    ) -> control_pb2.ListQuarantineResponse:
        """Returns the requests that are refused, without their content."""
        query = frontend_pb2.FrontendToCore(quarantine_query=frontend_pb2.QuarantineQuery())
        reply = await self.queries.ask(query)
        return control_pb2.ListQuarantineResponse(requests=reply.requests)

    async def ClearQuarantine(
        self, request: control_pb2.ClearQuarantineRequest, context: Any
    ) -> control_pb2.ClearQuarantineResponse:
        """Ends the quarantine of the requests with these keys, or of all, and returns how many they were."""
        if len(request.keys) > MAX_QUARANTINE_KEYS:
            raise status.invalid("keys", f"keys is {len(request.keys)} long; the limit is {MAX_QUARANTINE_KEYS}")
        for idx, key in enumerate(request.keys):
            if len(key) != QUARANTINE_KEY_CHARS:
                message = f"keys[{idx}] has {numbered(len(key), 'character')}; a key has {QUARANTINE_KEY_CHARS}"
                raise status.invalid(f"keys[{idx}]", message)
        clear = frontend_pb2.ClearQuarantine(keys=request.keys)
        reply = await self.queries.ask(frontend_pb2.FrontendToCore(clear_quarantine=clear))
        return control_pb2.ClearQuarantineResponse(removed=reply.removed)

    # A coroutine that writes, like every streaming method of the front end.
    async def Drain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.DrainRequest, context: Any
    ) -> None:
        """Drains a worker or the service, and writes the progress until the end."""
        check_drain(request)
        await self.drains.serve(request, context)

    async def UpdateWeights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.UpdateWeightsRequest, context: Any
    ) -> None:
        """Lets all workers load new weights, and writes the progress until the end."""
        check_update(request)
        await self.updates.serve(request, context)
