"""Owns the measuring of one call that streams: its meter, and how the call ended if it got no Summary."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

import grpc.aio

from scheduler_svc.frontend.rpc import status
from scheduler_svc.metrics.front_meter import FrontMeter, StreamMeter

_CALLER_LEFT = "CANCELLED"


@contextmanager
def measured(front: FrontMeter | None, *, is_resumed: bool) -> Generator[StreamMeter | None]:
    """Measures a call of Generate, or of Resume if `is_resumed`. Without a `front` it does nothing."""
    if front is None:
        yield None
        return
    meter = front.stream(is_resumed=is_resumed)
    try:
        yield meter
    except status.Refusal as refusal:
        meter.refused(refusal.code.name)
        raise
    except (asyncio.CancelledError, grpc.aio.InternalError):
        meter.refused(_CALLER_LEFT)
        raise
    except Exception:
        meter.refused(grpc.StatusCode.INTERNAL.name)
        raise
