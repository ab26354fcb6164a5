"""Owns what is special in Drain calls (`watches.py`): their check, their messages, their refusals."""

from collections.abc import Callable
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes import MAX_DRAIN_SECONDS, MAX_WORKER_NAME_CHARS
from scheduler_svc.frontend.watches.watches import Watches

_FINAL = frozenset(
    (
        control_pb2.DRAIN_STATE_DONE,
        control_pb2.DRAIN_STATE_TIME_LIMIT,
        control_pb2.DRAIN_STATE_WORKER_LOST,
    )
)


class DrainWatches(Watches):
    """`send` sends a message to the core and returns False without one."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        super().__init__(send, message_of=_message, refusal_of=_refusal, final=_FINAL)

    async def serve(self, request: control_pb2.DrainRequest, context: Any) -> None:
        """Handles one call. Raises Refusal."""
        check_drain(request)
        await super().serve(request, context)


def check_drain(request: control_pb2.DrainRequest) -> None:
    """Raises Refusal if a field is out of bounds."""
    # Also false for NaN.
    if not 0 <= request.max_seconds <= MAX_DRAIN_SECONDS:
        message = f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_DRAIN_SECONDS}"
        raise status.invalid("max_seconds", message)
    if len(request.worker) > MAX_WORKER_NAME_CHARS:
        message = f"worker has {len(request.worker)} characters; the limit is {MAX_WORKER_NAME_CHARS}"
        raise status.invalid("worker", message)


def _message(query: int, request: control_pb2.DrainRequest | None) -> frontend_pb2.FrontendToCore:
    drain = frontend_pb2.Drain(query=query, request=request, stop_replies=request is None)
    return frontend_pb2.FrontendToCore(drain=drain)


def _refusal(reply: frontend_pb2.DrainReply) -> status.Refusal:
    match reply.refusal:
        case frontend_pb2.REJECT_CODE_NOT_FOUND:
            return status.Refusal(grpc.StatusCode.NOT_FOUND, reply.message)
        case frontend_pb2.REJECT_CODE_INVALID:
            return status.invalid("worker", reply.message)
        case frontend_pb2.REJECT_CODE_QUEUE_FULL:
            return status.overloaded(reply.message)
        case _:
            return status.internal(reply.message)
