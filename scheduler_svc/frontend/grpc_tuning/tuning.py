"""Owns the switch of everything in this folder, and whether this gRPC, Python and system have what each part needs."""

import asyncio
import importlib
import logging
import os
import socket
from dataclasses import dataclass, fields

import grpc

from scheduler_svc.frontend.grpc_tuning import call_lines, ends, event_loop, sockets

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Which parts are on. Without a part the service does the same, but for what `_COSTS` says."""

    heap: bool = True
    corks: bool = True
    wakeups: bool = True
    writes: bool = True
    lines: bool = True
    release: bool = True
    resets: bool = True


ON = Tuning()
OFF = Tuning(**{part.name: False for part in fields(Tuning)})
_COSTS = {
    "heap": "the memory of calls that stall may grow by half",
    "corks": "each message is a packet of its own",
    "wakeups": "a message takes some 15 us more",
    "writes": "a message takes a task more",
    "lines": "under overload a refusal waits for those before it, for some 50 ms",
    "release": "a call with an unread answer stays until its connection ends",
    "resets": "connections that reset all their calls are not closed",
}


def find() -> Tuning:
    """Returns the parts that can be on. Logs a line for each of the others, with what its lack costs."""
    try:
        inside = vars(importlib.import_module("grpc._cython.cygrpc"))
    except ImportError:
        inside = {}
    has_sockets = os.path.isdir(sockets.FILES)
    parts = {
        "heap": event_loop.has_heaps(),
        "corks": has_sockets and hasattr(socket, "TCP_CORK"),
        "wakeups": event_loop.QUEUE in inside,
        "writes": hasattr(asyncio.Future, "_asyncio_future_blocking"),
        "lines": call_lines.can_ask(inside) and hasattr(asyncio.Future, "_asyncio_future_blocking"),
        "release": inside.keys() >= {ends.WAITING_COROUTINE, ends.BATCH},
        "resets": has_sockets and inside.keys() >= set(ends.QUESTIONS),
    }
    for name, is_there in parts.items():
        if not is_there:
            words = "grpc tuning: %s is off, because grpcio %s or this system lacks what it needs: %s"
            logger.warning(words, name, grpc.__version__, _COSTS[name])
    return Tuning(**parts)
