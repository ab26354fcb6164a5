"""Takes calls from gRPC, many in one turn of the event loop.

grpc.aio asks gRPC for one call of a method at a time. It asks for the next one four turns of the event loop after it
has got the last one, and gRPC's thread has to answer in between. While requests are let in and tokens are sent, a turn
takes a millisecond, and calls that arrive faster than that wait in line, behind each other.

Here gRPC is asked for NUM_ASKED calls of a method at once, and for another one in the turn that begins a call. The
server's own loop goes on beside this. The names below are those of grpcio 1.85.1.
"""

import asyncio
import functools
import importlib
from collections.abc import Coroutine, Mapping
from typing import Any

# A turn of the event loop that begins as many calls takes some milliseconds.
NUM_ASKED = 16

# The coroutine that begins a call, with its parameters, and the error of a question when the server stops.
BEGIN, END = "_handle_rpc", "_RequestCallError"
PARAMETERS = ("method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded")
# The coroutine around it, and the server's question for a call of a method.
AROUND, SERVER, QUESTION = "_schedule_rpc_coro", "AioServer", "_request_registered_call"


def can_ask(inside: Mapping[str, Any]) -> bool:
    """Whether gRPC's inner module, given by its names, has what is needed."""
    code = getattr(inside.get(BEGIN), "__code__", None)
    parameters = code.co_varnames[: len(PARAMETERS)] if code else ()
    return parameters == PARAMETERS and {AROUND, END} <= inside.keys() and hasattr(inside.get(SERVER), QUESTION)


class CallLines:
    """Takes the calls of some methods until the server stops. Make it when the server has started."""

    def __init__(self, server: Any, handlers: Mapping[str, Any]) -> None:
        """`server`: grpc.aio's. `handlers`: by `/package.Service/Method`; all are registered with the server."""
        self._server, self._handlers = server._server, handlers
        self._inside: Any = importlib.import_module("grpc._cython.cygrpc")
        self._loop = asyncio.get_running_loop()
        # The event loop itself keeps only weak references.
        self._tasks: set[asyncio.Task[None]] = set()
        for name in handlers:
            for _ in range(NUM_ASKED):
                self._ask(name)

    def resolve_handler(self, details: Any) -> Any:
        """Returns the handler of a call. gRPC asks for it when the call begins."""
        return self._handlers[details.method]

    def _ask(self, name: str) -> None:
        if self._server.is_running():
            asking = getattr(self._server, QUESTION)(name.encode())
            future = asking.send(None)
            # As a task does: the future then knows that it is waited for.
            future._asyncio_future_blocking = False
            future.add_done_callback(functools.partial(self._begin, name, asking))

    def _begin(self, name: str, asking: Coroutine[Any, Any, Any], _: object) -> None:
        try:
            asking.send(None)
        except StopIteration as answer:
            call = answer.value
            handling = getattr(self._inside, BEGIN)(name, self, (), call, self._loop, False)
            task = self._loop.create_task(getattr(self._inside, AROUND)(handling, call, self._loop, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        except getattr(self._inside, END):
            # The server stops, unless this was one call that failed.
            pass
        self._ask(name)
