"""Owns the Drain calls: asks the core to drain, and writes the progress that the core reports.

Keeps only the newest report of each call, so a caller that reads slowly delays nobody. A drain goes on if its caller
leaves.
"""

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend.rpc import status
from scheduler_svc.frontend.sizes.limits import MAX_DRAIN_SECONDS, MAX_WORKER_NAME_CHARS

REPLY_SECONDS = 5.0
_FINAL = (
    control_pb2.DRAIN_STATE_DONE,
    control_pb2.DRAIN_STATE_TIME_LIMIT,
    control_pb2.DRAIN_STATE_WORKER_LOST,
)


@dataclass(slots=True, eq=False)
class _Watch:
    """One Drain call. `reply` is the newest one that was not written; `is_lost`: no other will come."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reply: frontend_pb2.DrainReply | None = None
    is_lost: bool = False


class DrainWatches:
    """`send` sends a message to the core and returns False without one."""

    def __init__(self, send: Callable[[frontend_pb2.FrontendToCore], bool]) -> None:
        self._send = send
        self._ids = itertools.count(1)
        self._watches: dict[int, _Watch] = {}

    async def serve(self, request: control_pb2.DrainRequest, context: Any) -> None:
        """Handles one call. Raises Refusal."""
        # Also false for NaN.
        if not 0 <= request.max_seconds <= MAX_DRAIN_SECONDS or not math.isfinite(request.max_seconds):
            message = f"max_seconds is {request.max_seconds:g}; it must be between 0 and {MAX_DRAIN_SECONDS}"
            raise status.invalid("max_seconds", message)
        if len(request.worker) > MAX_WORKER_NAME_CHARS:
            raise status.invalid(
                "worker", f"worker has {len(request.worker)} characters; the limit is {MAX_WORKER_NAME_CHARS}"
            )
        query = next(self._ids)
        watch = self._watches[query] = _Watch()
        is_over = False
        try:
            if not self._send(_message(query, request)):
                raise _unreachable()
            while not is_over:
                reply = await self._next(watch)
                is_over = bool(reply.message) or reply.progress.state in _FINAL
                if reply.message:
                    raise _refusal(reply)
                await context.write(reply.progress)
        finally:
            del self._watches[query]
            if not is_over:
                self._send(_message(query, control_pb2.DrainRequest(), stop_replies=True))

    def answer(self, reply: frontend_pb2.DrainReply) -> None:
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

    async def _next(self, watch: _Watch) -> frontend_pb2.DrainReply:
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


def _message(
    query: int, request: control_pb2.DrainRequest, *, stop_replies: bool = False
) -> frontend_pb2.FrontendToCore:
    drain = frontend_pb2.Drain(query=query, request=request, stop_replies=stop_replies)
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


def _unreachable() -> status.Refusal:
    return status.not_ready("the scheduler's core cannot be reached")
