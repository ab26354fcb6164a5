"""Takes calls of a method from gRPC as fast as their method can begin them.

grpc.aio asks gRPC for one call of a method at a time. It asks for the next one four turns of the event loop after it
has got the last one, and gRPC's thread has to answer in between. While requests are let in and tokens are sent, a turn
takes a millisecond, and calls that arrive faster than that wait in line, behind each other.

Here gRPC is asked for NUM_ASKED calls of a method at once, and the owner of the method says how many of those that are
here begin in a turn. The server itself takes no calls of a method that has a line. The names below are those of grpcio
1.85.1.
"""

import asyncio
import importlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc.aio

from scheduler_svc.frontend.grpc_tuning.event_loop import run_here

NUM_ASKED = 16

# The coroutine that begins a call, with its parameters, and the error of a question when the server stops.
BEGIN, END = "_handle_rpc", "_RequestCallError"
PARAMETERS = ("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded")
# The coroutine around it.
AROUND = "_schedule_rpc_coro"
# The server, its question for a call of a method, and how its own loop asks that.
SERVER, QUESTION, OWN_QUESTION = "AioServer", "_request_registered_call", "_make_request_call_future"


def can_ask(inside: Mapping[str, Any]) -> bool:
    """Whether gRPC's inner module, given by its names, has what is needed."""
    code = getattr(inside.get(BEGIN), "__code__", None)
    parameters = code.co_varnames[: len(PARAMETERS)] if code else ()
    has_names = {AROUND, END} <= inside.keys() and {QUESTION, OWN_QUESTION} <= set(dir(inside.get(SERVER)))
    return parameters == PARAMETERS and has_names


# By method, `/package.Service/Method`: its handler, and the most calls that begin in this turn of the event loop.
Lines = dict[str, tuple[Any, Callable[[], int]]]


def server_with_lines(options: Sequence[tuple[str, Any]], lines: Lines) -> grpc.aio.Server:
    """Returns a server of grpc.aio with these options. A method that is in `lines` at its start has a line there."""
    inside: Any = importlib.import_module("grpc._cython.cygrpc")
    own = getattr(inside, SERVER)

    def ask(server: Any, name: bytes | None) -> asyncio.Future[Any]:
        if name is None or (method := name.decode()) not in lines:
            return getattr(own, OWN_QUESTION)(server, name)
        CallLine(server, method, *lines[method])
        # The server's loop gets no call from it, and cancels it at the end.
        return asyncio.get_running_loop().create_future()

    setattr(inside, SERVER, type(SERVER, (own,), {OWN_QUESTION: ask}))
    try:
        return grpc.aio.server(options=options)
    finally:
        setattr(inside, SERVER, own)


class CallLine:
    """Takes the calls of a method, until the server stops."""

    def __init__(self, server: Any, name: str, handler: Any, most: Callable[[], int]) -> None:
        """`server`: the inner one, which has started."""
        self._server, self._name, self._handler, self._most = server, name, handler, most
        self._inside: Any = importlib.import_module("grpc._cython.cygrpc")
        self._loop = asyncio.get_running_loop()
        # The calls that are here and have not begun, the oldest first.
        self._arrived: deque[Any] = deque()
        # How many have begun in this turn.
        self._num_begun = 0
        self._is_counting = False
        # The event loop itself keeps only weak references.
        self._tasks: set[asyncio.Task[None]] = set()
        for _ in range(NUM_ASKED):
            self._ask()

    def resolve_handler(self, _: object) -> Any:
        """Returns the handler of a call. gRPC asks for it when the call begins."""
        return self._handler

    def _ask(self) -> None:
        if self._server.is_running():
            run_here(self._wait(), self._take)

    async def _wait(self) -> None:
        self._arrived.append(await getattr(self._server, QUESTION)(self._name.encode()))

    def _take(self, error: BaseException | None) -> None:
        if error is None:
            self._begin_some()
        elif isinstance(error, getattr(self._inside, END)):
            # The server stops, unless this was one call that failed.
            self._ask()
        else:
            raise error

    def _begin_some(self) -> None:
        while self._arrived and self._num_begun < self._most():
            self._num_begun += 1
            self._begin(self._arrived.popleft())
            self._ask()
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._num_begun, self._is_counting = 0, False
        if self._arrived:
            self._begin_some()

    def _begin(self, call: Any) -> None:
        handling = getattr(self._inside, BEGIN)(self._name, self, (), call, self._loop, False)
        task = self._loop.create_task(getattr(self._inside, AROUND)(handling, call, self._loop, self._name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
