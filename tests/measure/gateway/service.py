"""A fake service as a process of its own; it prints its address.

Every Generate call gets Accepted, then deltas of one token each, as many as max_new_tokens, then Finished and Summary.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio
from tandem.v1 import control_pb2, inference_pb2

MODEL = "benchmark"
# As long as a word with its blank.
TEXT = " token"
_ACCEPTED = inference_pb2.GenerateResponse(
    accepted=inference_pb2.Accepted(request_id="x", prompt_tokens=1, max_new_tokens=1)
).SerializeToString()
_CALLER = control_pb2.GetCallerResponse(rights=["inference"]).SerializeToString()
_INFO = control_pb2.GetModelInfoResponse(model=MODEL, max_length=1 << 20).SerializeToString()


def _end(num_tokens: int) -> list[bytes]:
    finished = inference_pb2.Finished(reason=inference_pb2.FINISH_REASON_LENGTH, output_tokens=num_tokens)
    usage = inference_pb2.Usage(prompt_tokens=1, output_tokens=num_tokens)
    last = (
        inference_pb2.GenerateResponse(finished=finished),
        inference_pb2.GenerateResponse(summary=inference_pb2.Summary(usage=usage)),
    )
    return [message.SerializeToString() for message in last]


def delta(offset: int) -> bytes:
    """One token; no ids, as the gateway asks for none."""
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(token_offset=offset, text=TEXT)
    ).SerializeToString()  # fmt: skip


class _Service(grpc.GenericRpcHandler):
    def __init__(self, rate: float, *, is_apart: bool, token: str | None) -> None:
        self._rate, self._is_apart = rate, is_apart
        self._token = token
        self._tick = asyncio.Event()

    async def tick(self) -> None:
        """Lets all streams send a token, at the rate."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / self._rate, loop.time())
            await asyncio.sleep(due - loop.time())
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method.endswith("/Generate"):
            return grpc.unary_stream_rpc_method_handler(self._generate)
        if method.endswith("/GetModelInfo"):
            return grpc.unary_unary_rpc_method_handler(self._info)
        if method.endswith("/GetCaller"):
            return grpc.unary_unary_rpc_method_handler(self._who)
        return None

    async def _enter(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get("authorization")
        if self._token is not None and given != f"Bearer {self._token}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not valid")

    async def _info(self, request: bytes, context: Any) -> bytes:
        await self._enter(context)
        return _INFO

    async def _who(self, request: bytes, context: Any) -> bytes:
        await self._enter(context)
        return _CALLER

    async def _generate(self, request: bytes, context: Any) -> None:
        await self._enter(context)
        count = inference_pb2.GenerateRequest.FromString(request).stop.max_new_tokens
        await context.write(_ACCEPTED)
        for offset in range(count):
            if self._is_apart and offset:
                await asyncio.sleep(1 / self._rate)
            elif self._rate and not self._is_apart:
                await self._tick.wait()
            await context.write(delta(offset))
        for message in _end(count):
            await context.write(message)


async def serve(rate: float, *, is_apart: bool = False, token: str | None = None) -> None:
    """All streams get a token at once, as those of a step do: `rate` times per second, or as fast as they are read (0).

    If `is_apart` each has its own clock, and its first token at once. With a token it knows the callers that have it.
    """
    server, service = grpc.aio.server(), _Service(rate, is_apart=is_apart, token=token)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening on 127.0.0.1:{port}", flush=True)
    if rate and not is_apart:
        await service.tick()
    await server.wait_for_termination()
