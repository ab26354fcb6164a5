"""Random messages to every gRPC method of a running service, over a real socket.

Owns the calls and the list of methods, which comes from the descriptors of all services. A call fails the run if the
service answers UNKNOWN (gRPC's answer to an exception in a handler), INTERNAL, UNIMPLEMENTED or UNAVAILABLE.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from tandem.v1 import control_pb2, inference_pb2

from tests.chaos.requests import random_ask
from tests.fuzz.messages import MessageMaker
from tests.fuzz.metadata import FuzzDoor, Metadata

_SERVICES: tuple[Any, ...] = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    control_pb2.DESCRIPTOR.services_by_name["ControlService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
)
_WRONG = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_CONCURRENT = 48
_CALL_SECONDS = 10.0
# Some requests of Generate are whole and small, so that frames near a valid one are tried, too.
_REAL_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of the messages of one method; `wrong` has the first messages that were answered wrongly."""

    method: str
    codes: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    uncovered: set[str] = field(default_factory=set[str])
    seconds: float = 0.0


def methods() -> list[MethodDescriptor]:
    """Every method that the front end serves."""
    return [method for service in _SERVICES for method in service.methods]


def fuzz_method(address: str, method: MethodDescriptor, count: int, seed: int, door: FuzzDoor | None = None) -> Outcome:
    """Sends `count` messages to the method, with a `door` over TLS and with random metadata."""
    return asyncio.run(_Calls(method, count, random.Random(f"{seed} {method.full_name}"), door).run(address))


class _Calls:
    def __init__(self, method: MethodDescriptor, count: int, rng: random.Random, door: FuzzDoor | None) -> None:
        self._door = door
        self._method = method
        self._left = count
        self._rng = rng
        self._maker = MessageMaker(message_factory.GetMessageClass(method.input_type), rng)
        self._outcome = Outcome(method=method.full_name)
        self._is_generate = method.name == "Generate"

    async def run(self, address: str) -> Outcome:
        began = time.monotonic()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with self._channel(address, options) as channel:
            path = f"/{self._method.containing_service.full_name}/{self._method.name}"
            kind: Any = channel.unary_stream if self._method.server_streaming else channel.unary_unary
            call: Callable[..., Any] = kind(path)
            await asyncio.gather(*(self._worker(call) for _ in range(_CONCURRENT)))
        self._outcome.uncovered = self._maker.fields() - self._maker.covered
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _channel(self, address: str, options: Any) -> grpc.aio.Channel:
        if self._door is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._door.credentials, options=options)

    async def _worker(self, call: Callable[..., Any]) -> None:
        while self._left > 0:
            self._left -= 1
            frame = self._frame()
            metadata, allowed = self._door.metadata(self._rng) if self._door is not None else ((), frozenset())
            code, details = await self._answer(call, frame, metadata)
            self._outcome.codes[code.name] += 1
            is_wrong = code not in allowed if allowed else code in _WRONG or code == grpc.StatusCode.UNAUTHENTICATED
            if is_wrong and len(self._outcome.wrong) < 5:
                self._outcome.wrong.append(f"{code.name}: {details}; the message: {frame[:400].hex()}")

    def _frame(self) -> bytes:
        if self._is_generate and self._rng.random() < _REAL_SHARE:
            number = self._rng.randrange(1 << 30)
            frame = random_ask(self._rng, f"fuzz-{number}", resumes=False).request().SerializeToString()
            self._maker.keep(frame)
            return frame
        frame = self._maker.frame()
        while self._method.name == "Drain" and _drains_the_service(frame):
            frame = self._maker.frame()
        return frame

    async def _answer(self, call: Callable[..., Any], frame: bytes, metadata: Metadata) -> tuple[grpc.StatusCode, str]:
        made = call(frame, timeout=_CALL_SECONDS, metadata=metadata)
        try:
            if self._method.server_streaming:
                # Watch never ends; a caller of Generate that leaves early is a case of its own.
                limit = 1 if self._method.name == "Watch" else self._rng.choice([1, 2, 1 << 30])
                async for _ in made:
                    limit -= 1
                    if not limit:
                        made.cancel()
                        break
            else:
                await made
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details())
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
        with contextlib.suppress(asyncio.CancelledError):
            return await made.code(), ""
        return grpc.StatusCode.CANCELLED, ""


def _drains_the_service(frame: bytes) -> bool:
    """Returns whether the message would end the service under test, as it should."""
    try:
        return not control_pb2.DrainRequest.FromString(frame).worker
    except DecodeError:
        return False
