"""Translates ListRequests: checks a call, asks the core for one page, and says what the caller may see.

Owns the form of page tokens, and how many calls may wait: the core answers one at a time for each front end, so that
callers that list without a pause cost it little.
"""

import base64
import binascii
import struct

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.core.messages.names import core_id
from scheduler_svc.door.tenant import Caller, Right
from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.rpc.gate import Bound
from scheduler_svc.frontend.sizes import Check, wrong
from tandem_contract.limits import limit_at

# The calls of one tenant that wait for their turn.
WAITING = Bound(per_key=16, thing="ListRequests call", state="wait")
# Number and epoch of a RequestsMark.
_TOKEN = struct.Struct("<Qd")
_check = Check(control_pb2.ListRequestsRequest)
_PAGE_SIZE = int(limit_at(control_pb2.ListRequestsRequest, "page_size").most)


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
    mark = _TOKEN.pack(reply.next.number, reply.next.epoch) if reply.HasField("next") else b""
    token = base64.urlsafe_b64encode(mark).decode()
    return control_pb2.ListRequestsResponse(requests=reply.requests, next_page_token=token)


def _mark_of(token: str) -> frontend_pb2.RequestsMark:
    try:
        number, epoch = _TOKEN.unpack(base64.b64decode(token.encode(), altchars=b"-_", validate=True))
    except (binascii.Error, struct.error, UnicodeEncodeError):
        raise wrong("page_token", "is not one that ListRequests gave") from None
    return frontend_pb2.RequestsMark(number=number, epoch=epoch)
