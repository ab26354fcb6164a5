"""Owns ControlService. The core decides; this module asks it and waits.

Knows nothing of streams. Matches replies to queries, limits the queries in flight, and lets concurrent GetLoad calls
share one query. A call that watches a drain or an update of weights is a query too, with many replies. The core answers
one ListRequests at a time for each front end, so that callers that list without a pause cost it little.
"""

import asyncio
import base64
import binascii
import itertools
import struct
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, control_pb2_grpc

from scheduler_svc.core.messages.names import core_id, meant
from scheduler_svc.door.tenant import Caller, Right
from scheduler_svc.frontend.entrance import caller
from scheduler_svc.frontend.readiness import Readiness
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound, Gate
from scheduler_svc.frontend.sizes import Check, limits_reply, wrong
from scheduler_svc.frontend.validate import check_request_id
from scheduler_svc.frontend.watching import Watch
from tandem_contract.limits import limit_at
from tandem_contract.plural import numbered

REPLY_SECONDS = 5.0

# Sends a message to the core; returns False without one.
Send = Callable[[frontend_pb2.FrontendToCore], bool]
_check_abort, _check_clear = Check(control_pb2.AbortRequest), Check(control_pb2.ClearQuarantineRequest)
_check_drain, _check_update = Check(control_pb2.DrainRequest), Check(control_pb2.UpdateWeightsRequest)
_KEY_CHARS = limit_at(control_pb2.ClearQuarantineRequest, "keys").chars


def _refusal(reply: Any, not_found: grpc.StatusCode) -> status.Refusal:
    """Why the core does not begin an operation."""
    match reply.refusal:
        case frontend_pb2.REJECT_CODE_NOT_FOUND:
            return status.Refusal(not_found, reply.message)
        case frontend_pb2.REJECT_CODE_INVALID:
            return status.invalid(reply.field, reply.message)
        case frontend_pb2.REJECT_CODE_DUPLICATE:
            return status.Refusal(grpc.StatusCode.ALREADY_EXISTS, reply.message)
        case frontend_pb2.REJECT_CODE_QUEUE_FULL:
            return status.overloaded(reply.message)
        case frontend_pb2.REJECT_CODE_NOT_READY:
            return status.not_ready(reply.message)
        case _:
            return status.internal(reply.message)


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")


MAX_QUERIES = 1024


@dataclass(slots=True, eq=False, kw_only=True)
class _Query(Watch):
    """A call that waits for the core. `reply` is the newest one that was not read; `is_lost`: no other will come."""

    reply: Any = None
    is_lost: bool = False

    def take(self, reply: Any) -> None:
        """A reply of the core, or None: the core is gone. What it replied last is read before."""
        self.reply, self.is_lost = reply or self.reply, reply is None
        self.changed.set()

    async def next(self) -> Any:
        """Waits for a reply. Raises Refusal."""
        try:
            async with asyncio.timeout(REPLY_SECONDS):
                await self.wait()
        except TimeoutError:
            raise status.not_ready(f"the scheduler's core has not answered for {REPLY_SECONDS:g} s") from None
        if self.is_lost:
            self.changed.set()
        reply, self.reply = self.reply, None
        if reply is None:
            raise _unreachable()
        return reply


class CoreQueries:
    """Queries to the core that wait for one reply, or for the progress of an operation. They raise Refusal."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Query] = {}
        self._load: asyncio.Task[frontend_pb2.LoadReply] | None = None

    @property
    def watches(self) -> Collection[Watch]:
        return self._waiting.values()

    @contextmanager
    def _asked(self, message: frontend_pb2.FrontendToCore, who: Caller | None = None) -> Generator[_Query]:
        """Sends the query in `message`. Caller `who` watches what it starts."""
        if len(self._waiting) >= MAX_QUERIES:
            raise status.overloaded(f"{len(self._waiting)} queries wait for the core; the limit is {MAX_QUERIES}")
        query = next(self._ids)
        getattr(message, str(message.WhichOneof("message"))).query = query
        waiting = self._waiting[query] = _Query(caller=who)
        try:
            if not self._send(message):
                raise _unreachable()
            yield waiting
        finally:
            del self._waiting[query]

    async def ask(self, **query: Any) -> Any:
        """Sends the message with this query and returns its reply."""
        with self._asked(frontend_pb2.FrontendToCore(**query)) as asked:
            return await asked.next()

    async def follow(self, message: frontend_pb2.FrontendToCore, context: Any, *, not_found: grpc.StatusCode) -> None:
        """Starts the operation in `message` and writes its progress until its end; it goes on if the caller leaves.

        `not_found`: the status if the core does not find what is meant.
        """
        with self._asked(message, caller()) as query:
            is_over = False
            try:
                while not is_over:
                    reply = await query.next()
                    is_over = reply.is_last or bool(reply.message)
                    if reply.message:
                        raise _refusal(reply, not_found)
                    await query.write(context, reply.progress)
            finally:
                if not is_over:
                    asked = getattr(message, str(message.WhichOneof("message")))
                    asked.ClearField("request")
                    asked.stop_replies = True
                    self._send(message)

    async def load(self) -> frontend_pb2.LoadReply:
        """Returns the core's load. Calls that overlap share one query."""
        if self._load is None or self._load.done():
            self._load = asyncio.create_task(self.ask(load_query=frontend_pb2.LoadQuery()))
            # Retrieves the exception here too, because every caller may have left.
            self._load.add_done_callback(lambda task: task.cancelled() or task.exception())
        # If one caller leaves, the others still get the reply.
        return await asyncio.shield(self._load)

    def answer(self, reply: Any) -> None:
        """Passes a reply to its query. Drops it if the query no longer waits."""
        if (waiting := self._waiting.get(reply.query)) is not None:
            waiting.take(reply)

    def fail_all(self) -> None:
        """Fails every query, because the core is gone."""
        for waiting in self._waiting.values():
            waiting.take(None)


# The calls of one tenant that wait for their turn.
_WAITING = Bound(per_key=16, thing="ListRequests call", state="wait")
# Number and epoch of a RequestsMark.
_TOKEN = struct.Struct("<Qd")
_check_list = Check(control_pb2.ListRequestsRequest)
_PAGE_SIZE = int(limit_at(control_pb2.ListRequestsRequest, "page_size").most)


def _query_of(request: control_pb2.ListRequestsRequest, who: Caller) -> frontend_pb2.RequestsQuery:
    """Returns the query to the core for one page. Raises Refusal."""
    _check_list(request)
    last = len(control_pb2.RequestState.values()) - 1
    for idx, state in enumerate(request.states):
        if not 1 <= state <= last:
            raise wrong(f"states[{idx}]", f"is {state}; it must be between 1 and {last}")
    sees_all = Right.CONTROL in who.rights
    if request.tenant not in ("", who.tenant) and not sees_all:
        message = f"tenant is {request.tenant!r}; without the right control only requests of {who.tenant!r} are listed"
        raise status.Refusal(grpc.StatusCode.PERMISSION_DENIED, message)
    return frontend_pb2.RequestsQuery(
        page_size=request.page_size or _PAGE_SIZE,
        states=request.states,
        id_prefix=request.id_prefix,
        tenant=request.tenant or who.tenant,
        all_tenants=sees_all and not request.tenant,
        after=_mark_of(request.page_token) if request.page_token else None,
    )


def _page_of(reply: frontend_pb2.RequestsReply, who: Caller) -> control_pb2.ListRequestsResponse:
    """Returns what the caller may see of a page. Raises Refusal."""
    if reply.is_stale:
        raise wrong("page_token", "was made before the service started again; list from the beginning, without it")
    for entry in reply.requests:
        entry.abort_id = core_id(entry.tenant, entry.request_id) if Right.CONTROL in who.rights else entry.request_id
    mark = _TOKEN.pack(reply.next.number, reply.next.epoch) if reply.HasField("next") else b""
    token = base64.urlsafe_b64encode(mark).decode()
    return control_pb2.ListRequestsResponse(requests=reply.requests, next_page_token=token)


def _mark_of(token: str) -> frontend_pb2.RequestsMark:
    try:
        number, epoch = _TOKEN.unpack(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, struct.error, UnicodeEncodeError):
        raise wrong("page_token", "is not one that ListRequests gave") from None
    return frontend_pb2.RequestsMark(number=number, epoch=epoch)


def _looked_for(request_id: str, who: Caller) -> str:
    """Returns a sentence about the names under which no request was found."""
    tried = meant(request_id, who.tenant, all_tenants=Right.CONTROL in who.rights)
    return f"no waiting or running request has the id {' or '.join(map(repr, tried))}"


@dataclass(eq=False)
class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Serves operators: inspects the service and controls it."""

    readiness: Readiness
    queries: CoreQueries
    max_message_bytes: int = field(kw_only=True)
    _listing: Gate = field(default_factory=lambda: Gate(Bound(most=1), _WAITING), init=False)

    async def Abort(self, request: control_pb2.AbortRequest, context: Any) -> control_pb2.AbortResponse:
        """Returns for each id whether it was live. The streams themselves end with ABORTED.

        The ids are the caller's own. With the right of control, `tenant/id` means another tenant's request.
        """
        _check_abort(request)
        if not request.request_ids:
            raise wrong("request_ids", "is empty; at least 1 id is needed")
        for idx, request_id in enumerate(request.request_ids):
            if not request_id:
                raise wrong(f"request_ids[{idx}]", "is empty; an id is needed")
            check_request_id(f"request_ids[{idx}]", request_id)
        ids, who = list(dict.fromkeys(request.request_ids)), caller()
        abort = frontend_pb2.Abort(request_ids=ids, tenant=who.tenant, all_tenants=Right.CONTROL in who.rights)
        reply = await self.queries.ask(abort=abort)
        results = {
            request_id: control_pb2.AbortResult(
                request_id=request_id,
                outcome=result.outcome,
                detail=_looked_for(request_id, who) if result.outcome == control_pb2.ABORT_OUTCOME_NOT_FOUND else "",
            )
            for request_id, result in zip(ids, reply.results, strict=True)
        }
        return control_pb2.AbortResponse(results=[results[name] for name in request.request_ids])

    async def ListRequests(
        self, request: control_pb2.ListRequestsRequest, context: Any
    ) -> control_pb2.ListRequestsResponse:
        who = caller()
        query = _query_of(request, who)
        await self._listing.enter(who.tenant)
        try:
            reply = await self.queries.ask(requests_query=query)
        finally:
            self._listing.leave(who.tenant)
        return _page_of(reply, who)

    async def GetCaller(self, request: control_pb2.GetCallerRequest, context: Any) -> control_pb2.GetCallerResponse:
        who = caller()
        return control_pb2.GetCallerResponse(tenant=who.tenant, rights=sorted(who.rights))

    async def GetModelInfo(
        self, request: control_pb2.GetModelInfoRequest, context: Any
    ) -> control_pb2.GetModelInfoResponse:
        """Returns the served model, its limits for this caller and its defaults, also while the service drains."""
        model = self.readiness.model()
        info = control_pb2.GetModelInfoResponse()
        info.CopyFrom(model.info)
        limits = limits_reply(model.sizes, caller().limits, max_message_bytes=self.max_message_bytes)
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
        reply = await self.queries.ask(flush_cache=frontend_pb2.FlushCache())
        return control_pb2.FlushCacheResponse(pages=reply.pages)

    async def ListQuarantine(
        self, request: control_pb2.ListQuarantineRequest, context: Any
    ) -> control_pb2.ListQuarantineResponse:
        reply = await self.queries.ask(quarantine_query=frontend_pb2.QuarantineQuery())
        return control_pb2.ListQuarantineResponse(requests=reply.requests)

    async def ClearQuarantine(
        self, request: control_pb2.ClearQuarantineRequest, context: Any
    ) -> control_pb2.ClearQuarantineResponse:
        _check_clear(request)
        for idx, key in enumerate(request.keys):
            if len(key) != _KEY_CHARS:
                raise wrong(f"keys[{idx}]", f"has {numbered(len(key), 'character')}; a key has {_KEY_CHARS}")
        reply = await self.queries.ask(clear_quarantine=frontend_pb2.ClearQuarantine(keys=request.keys))
        return control_pb2.ClearQuarantineResponse(removed=reply.removed)

    # A coroutine that writes, like every streaming method of the front end.
    async def Drain(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.DrainRequest, context: Any
    ) -> None:
        _check_drain(request)
        message = frontend_pb2.FrontendToCore(drain=frontend_pb2.Drain(request=request))
        await self.queries.follow(message, context, not_found=grpc.StatusCode.NOT_FOUND)

    async def UpdateWeights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: control_pb2.UpdateWeightsRequest, context: Any
    ) -> None:
        _check_update(request)
        # The core checks whether folder and version can be.
        for name, text in (("version", request.version), ("folder", request.folder)):
            if not text or not text.isprintable():
                raise wrong(name, f"is {text!r}; it must not be empty or contain control characters")
        message = frontend_pb2.FrontendToCore(update_weights=frontend_pb2.UpdateWeights(request=request))
        # The service has no such method unless it was started with it.
        await self.queries.follow(message, context, not_found=grpc.StatusCode.PERMISSION_DENIED)
