"""Owns what is special in UpdateWeights calls (`watches.py`): their check, their messages, their refusals."""

from collections.abc import Callable
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import MAX_FOLDER_CHARS, MAX_UPDATE_SECONDS, MAX_VERSION_CHARS
from scheduler_svc.frontend.watches.watches import Watches

_FINAL = frozenset(
    (
        control_pb2.UPDATE_STATE_DONE,
        control_pb2.UPDATE_STATE_REFUSED,
        control_pb2.UPDATE_STATE_TIME_LIMIT,
        control_pb2.UPDATE_STATE_INCOMPLETE,
    )
)


class WeightsWatches(Watches):
    """`send` sends a message to the core and returns False without one."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        super().__init__(send, message_of=_message, refusal_of=_refusal, final=_FINAL)

    async def serve(self, request: control_pb2.UpdateWeightsRequest, context: Any) -> None:
        """Handles one call. Raises Refusal."""
        check_update(request)
        await super().serve(request, context)


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


def _message(query: int, request: control_pb2.UpdateWeightsRequest | None) -> frontend_pb2.FrontendToCore:
    update = frontend_pb2.UpdateWeights(query=query, request=request, stop_replies=request is None)
    return frontend_pb2.FrontendToCore(update_weights=update)


def _refusal(reply: frontend_pb2.UpdateWeightsReply) -> status.Refusal:
    match reply.refusal:
        case frontend_pb2.REJECT_CODE_INVALID:
            return status.invalid(reply.field, reply.message)
        case frontend_pb2.REJECT_CODE_DUPLICATE:
            return status.Refusal(grpc.StatusCode.ALREADY_EXISTS, reply.message)
        case frontend_pb2.REJECT_CODE_NOT_FOUND:
            # The service has no such method unless it was started with it.
            return status.Refusal(grpc.StatusCode.PERMISSION_DENIED, reply.message)
        case frontend_pb2.REJECT_CODE_NOT_READY:
            return status.not_ready(reply.message)
        case _:
            return status.internal(reply.message)
