"""Translates ListRequests: checks a call, asks the core for one page, and says what the caller may see.

Owns the form of page tokens, and the turns of the calls: the core answers one at a time for each front end, so that
callers who list without a pause cost it little.
"""

import asyncio
import base64
import binascii
import contextlib
import struct
from collections import Counter
from collections.abc import AsyncGenerator

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.messages.names import core_id
from scheduler_svc.door.tenant import Caller, Right
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import Check, wrong
from tandem_contract.limits import limit_at

MAX_WAITING = 16
"""Calls of one tenant that wait for their turn."""
# Number and epoch of a RequestsMark.
_TOKEN = struct.Struct("<Qd")
_check = Check(control_pb2.ListRequestsRequest)
_PAGE_SIZE = int(limit_at(control_pb2.ListRequestsRequest, "page_size").most)


class Turns:
    """One call at a time, in the order of arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = Counter[str]()

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Waits for the turn of a call. Raises Refusal if too many of its tenant wait."""
        if (count := self._waiting[tenant]) >= MAX_WAITING:
            raise status.overloaded(f"{count} ListRequests calls wait; the limit is {MAX_WAITING}")
        self._waiting[tenant] += 1
        try:
            async with self._lock:
                yield
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]


def check_list(request: control_pb2.ListRequestsRequest) -> None:
    """Raises Refusal if a field is out of bounds."""
    _check(request)
    last = len(control_pb2.RequestState.values()) - 1
    for idx, state in enumerate(request.states):
        if not 1 <= state <= last:
            raise wrong(f"states[{idx}]", f"is {state}; it must be between 1 and {last}")


def query_of(request: control_pb2.ListRequestsRequest, who: Caller) -> frontend_pb2.RequestsQuery:
    """Returns the query to the core. Raises Refusal."""
    check_list(request)
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


def page_of(reply: frontend_pb2.RequestsReply, who: Caller) -> control_pb2.ListRequestsResponse:
    """Returns the answer to a caller. Raises Refusal."""
    if reply.is_stale:
        raise wrong("page_token", "was made before the service started again; list from the beginning, without it")
    for entry in reply.requests:
        entry.abort_id = core_id(entry.tenant, entry.request_id) if Right.CONTROL in who.rights else entry.request_id
    token = _token_of(reply.next) if reply.HasField("next") else ""
    return control_pb2.ListRequestsResponse(requests=reply.requests, next_page_token=token)


def _token_of(mark: frontend_pb2.RequestsMark) -> str:
    return base64.urlsafe_b64encode(_TOKEN.pack(mark.number, mark.epoch)).decode()


def _mark_of(token: str) -> frontend_pb2.RequestsMark:
    try:
        number, epoch = _TOKEN.unpack(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, struct.error, UnicodeEncodeError):
        raise wrong("page_token", "is none that ListRequests gave") from None
    return frontend_pb2.RequestsMark(number=number, epoch=epoch)
