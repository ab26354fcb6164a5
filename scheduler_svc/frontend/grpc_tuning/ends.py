"""Owns the ends that grpc.aio cannot make: of calls with an unread answer, and of connections that reset their
calls.

**Release.** grpc.aio has no way to cancel a call from the server. A call with a written but unread answer is
released, which resets its HTTP/2 stream, when the two tasks that serve it have ended: the handler's task, and a task
that waits for gRPC to report the call's end. gRPC's core writes that report into objects that only these tasks hold, so
the releaser keeps the objects alive until the report has been written. grpc.aio itself keeps references to its newest
call, and to the first one of Watch and of all methods without a line of their own, so those three are reset later. The
names below are those of grpcio 1.85.1. With a version that has other names nothing is released, and the log reports it.

**Resets.** A connection may reset fewer than `MAX_RESETS` calls a second; then it is closed and its host barred for a
time. A call that is reset before its message is read costs this process more than its caller, and gRPC has no bound
for that (grpcio 1.85.1: also with its own protection against it, 270,000 resets per second reach the server).
Such a connection never runs out of frames, so it keeps one of gRPC's threads. gRPC has four of them on a small machine
and adds one a second; until then no other connection's frames are read. A caller opens the next connection as soon as
one is closed, so its host is barred as well.

The event loop takes some thousand calls a second from gRPC, in one line for all, so it meets the calls of a second
connection when those of the first are done. gRPC knows how many calls of each connection wait (channelz; the names
here are those of grpcio 1.85.1); it is asked when a connection resets nearly all its calls. Callers that change their
mind have sent the message with the call, and it is read.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, cast

from scheduler_svc.frontend.grpc_tuning.sockets import BAR_SECONDS, BarredHosts, Network, network_of, sockets_to
from tandem_contract.plural import numbered

logger = logging.getLogger(__name__)

# The coroutine of the second task, and the types on the path from a task to the objects that gRPC's core writes into.
WAITING_COROUTINE = "_schedule_rpc_coro"
CONTAINERS = ("coroutine", "tuple")
SCOPE_PREFIX = "__pyx_scope_struct"
OPERATION_SUFFIX = "Operation"
BATCH = "_BatchOperationTag"


class Releaser:
    """Ends calls by their handlers' tasks. Keeps the objects that gRPC's core may still write into for one sweep."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._kept: list[object] = []
        self._has_warned = False

    def release(self, overdue: Collection["asyncio.Task[Any]"]) -> int:
        """Ends the calls of these tasks and returns how many it could end. Call it at most about once a second."""
        # One second is a thousand times what gRPC's core takes to report the end of a call.
        self._kept = []
        overdue = {task for task in overdue if not task.done()}
        if not overdue or not self._is_on:
            return 0
        num_found = num_released = 0
        for task in asyncio.all_tasks():
            handler = _handler_of(task, overdue)
            if handler is None:
                continue
            num_found += 1
            operations = _operations(task.get_coro())
            # Without an operation, gRPC has reported the call's end and both tasks are about to end on their own.
            if operations:
                self._kept += operations + _operations(handler.get_coro())
                handler.cancel()
                task.cancel()
                num_released += 1
        if num_found < len(overdue) and not self._has_warned:
            self._has_warned = True
            logger.error(
                "%d of %s cannot be ended with this version of grpcio: the answers are unread",
                len(overdue) - num_found,
                numbered(len(overdue), "call"),
            )
        return num_released


def _handler_of(task: "asyncio.Task[Any]", overdue: Collection["asyncio.Task[Any]"]) -> "asyncio.Task[Any] | None":
    """The overdue handler's task that belongs to this waiting task; None for any other task."""
    coroutine = task.get_coro()
    if getattr(coroutine, "__name__", "") != WAITING_COROUTINE:
        return None
    for scope in gc.get_referents(coroutine):
        for held in gc.get_referents(scope):
            if isinstance(held, asyncio.Task) and held in overdue:
                return cast("asyncio.Task[Any]", held)
    return None


def _operations(coroutine: object) -> list[object]:
    """The operations that the coroutine's innermost calls have passed to gRPC's core."""
    operations, seen, pending = list[object](), set[int](), [coroutine]
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        name = type(one).__name__
        if name.endswith(OPERATION_SUFFIX) or name == BATCH:
            operations.append(one)
        elif name in CONTAINERS or name.startswith(SCOPE_PREFIX):
            pending.extend(gc.get_referents(one))
    return operations


# Resets of a connection in a second that make it suspect, with this share of resets among its calls.
WORTH_A_LOOK, MAX_SHARE = 10, 0.9
# A suspect connection is closed if MAX_WAITING of its calls wait in gRPC, or if it resets MAX_RESETS in a second. The
# other connections of its host are watched for a time, and closed if as many of their calls wait.
MAX_WAITING, MAX_RESETS = 200, 200
WATCH_SECONDS = 2.0
# A look at one connection takes the event loop up to 1 ms, with a thousand connections. The newest are looked at, and
# looks take a tenth of the time.
_MAX_LOOKED_AT, _LOOK_SECONDS, _PAUSE = 32, 0.05, 10.0
# What a closed connection has sent is dropped in pieces, _MAX_PIECES at most. The kernel holds some megabytes.
_PIECE_BYTES, _MAX_PIECES = 1 << 20, 32
# Calls of a closed connection are still taken from gRPC for some seconds. This many connections are remembered.
_MAX_CLOSED = 4096
# How gRPC names a connection, before the peer.
_NAME = "chttp2 "
# gRPC's functions that list its servers, the connections of a server, and the calls of a connection.
QUESTIONS = ("channelz_get_servers", "channelz_get_server_sockets", "channelz_get_socket")


class Resets:
    """Counts the calls, and those that were reset before their message was read, in the current second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._clock = clock
        self._barred = BarredHosts(clock)
        self._second = 0
        # By connection; `open`: those that the event loop has and that have not ended.
        self._open: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._resets: Counter[str] = Counter()
        self._closed: dict[str, None] = {}
        self._next_look = float("-inf")
        # When the watch of a host ends.
        self._watched: dict[Network | None, float] = {}
        # Since the last sweep.
        self._num_closed = 0

    def begin(self, peer: str) -> None:
        """Counts a call of the connection. `peer`: in gRPC's notation."""
        if (second := int(self._clock())) != self._second:
            self._second = second
            self._calls.clear()
            self._resets.clear()
        self._calls[peer] += 1
        self._open[peer] += 1

    def end(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def add(self, peer: str) -> None:
        """Counts a reset of the connection; if these are too many, closes it and those of its host that do the same."""
        self._resets[peer] += 1
        resets, now = self._resets[peer], self._clock()
        if not self._is_on or peer in self._closed or resets < WORTH_A_LOOK or resets < MAX_SHARE * self._calls[peer]:
            return
        host = network_of(peer)
        if resets == MAX_RESETS:
            self._close([peer])
        elif now >= self._next_look and host not in self._watched and self._look(host).get(peer, 0) >= MAX_WAITING:
            self._watch(host)

    def sweep(self) -> None:
        """Logs what was closed, and ends bars that are over. The owner calls this about once a second."""
        self._barred.sweep()
        if self._num_closed:
            line = "%d connections were closed and their hosts barred for %g s, because they reset too many calls"
            logger.warning(line, self._num_closed, BAR_SECONDS)
            self._num_closed = 0

    def _look(self, host: Network | None) -> dict[str, int]:
        """How many calls of each connection of the host the event loop does not have yet."""
        begun = self._clock()
        waiting = {peer: num - self._open[peer] for peer, num in _open_calls(host).items()}
        self._next_look = self._clock() + max(_LOOK_SECONDS, _PAUSE * (self._clock() - begun))
        return waiting

    def _watch(self, host: Network | None) -> None:
        """Closes the host's connections with too many waiting calls, again and again until none was closed for long."""
        over = [peer for peer, num in self._look(host).items() if num >= MAX_WAITING and peer not in self._closed]
        if over:
            self._close(over)
            self._watched[host] = self._clock() + WATCH_SECONDS
        if self._clock() < self._watched.get(host, 0.0):
            asyncio.get_running_loop().call_later(self._next_look - self._clock(), self._watch, host)
        else:
            self._watched.pop(host, None)

    def _close(self, peers: Collection[str]) -> None:
        sockets = sockets_to(peers)
        # First, because the next connection comes at once; and each host once, because that looks at all files.
        for network, port in {(network_of(peer), one.getsockname()[1]) for peer, one in sockets.items()}:
            if network is not None:
                self._barred.bar(network, port)
        for one in sockets.values():
            with one:
                _close(one)
        self._num_closed += len(sockets)
        self._closed.update(dict.fromkeys(peers))
        while len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]


def _open_calls(host: Network | None) -> dict[str, int]:
    """How many calls have not ended for gRPC, of each of the host's newest connections. Those that wait have not."""
    inside = importlib.import_module("grpc._cython.cygrpc")
    servers, sockets_of, socket_of = (getattr(inside, name) for name in QUESTIONS)
    num_open: dict[str, int] = {}
    for server in _answer_of(servers, 0).get("server", []):
        # All of a server's connections fit in one answer: options.MAX_CONNECTIONS.
        listed = _answer_of(sockets_of, int(server["ref"]["serverId"]), 0, 1 << 20)
        sockets = {one["name"].removeprefix(_NAME): int(one["socketId"]) for one in listed.get("socketRef", [])}
        for peer in [one for one in sockets if network_of(one) == host][-_MAX_LOOKED_AT:]:
            if one := _answer_of(socket_of, sockets[peer]):
                data = one["socket"]["data"]
                ended = int(data["streamsSucceeded"]) + int(data["streamsFailed"])
                num_open[peer] = int(data["streamsStarted"]) - ended
    return num_open


def _answer_of(ask: Callable[..., Any], *args: int) -> dict[str, Any]:
    """gRPC's answer; empty for a server or connection that is gone."""
    try:
        return cast("dict[str, Any]", json.loads(ask(*args)))
    except ValueError:
        return {}


def _close(connection: socket.socket) -> None:
    """Ends the connection of this socket, which is a duplicate of gRPC's."""
    buffer = bytearray(_PIECE_BYTES)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
        for _ in range(_MAX_PIECES):
            # For TCP this flag means that the bytes are not even copied.
            if not connection.recv_into(buffer, 0, socket.MSG_DONTWAIT | socket.MSG_TRUNC):
                break
