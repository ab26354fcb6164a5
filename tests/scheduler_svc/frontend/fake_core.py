"""Owns a fake core that tests control: a ROUTER socket that speaks frontend.proto. It decides nothing on its own."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import grpc
import numpy as np
import pytest
import zmq
import zmq.asyncio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

from scheduler_svc.frontend.rpc import gate
from scheduler_svc.frontend.server import FrontEnd
from scheduler_svc.processes.frontends import FrontEndSettings
from tests.rigs.raw_http2 import RawConnection
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.tokenizers_for_tests import EOS, as_json, byte_level

WAIT_SECONDS = TIMEOUT_SECONDS
CACHE_ROOT = bytes(range(32))
Test = TypeVar("Test", bound=Callable[..., Any])


def model_state(**changes: Any) -> frontend_pb2.ModelState:
    """A model of 300 tokens with the byte-level tokenizer."""
    tokenizer = byte_level()
    info = control_pb2.GetModelInfoResponse(
        model="toy",
        identity="abc",
        vocab_size=tokenizer.get_vocab_size(),
        max_length=512,
        page_size=16,
        num_pages=64,
        max_rows=8,
        token_budget=64,
        eos_token_ids=[tokenizer.token_to_id(EOS)],
        sampling_defaults=inference_pb2.SamplingParams(
            temperature=0.5, top_p=0.9, top_k=40, min_p=0.125, repetition_penalty=1.25
        ),
        default_max_new_tokens=100,
        max_waiting=4,
        has_tokenizer=True,
        max_num_samples=4,
        max_logprobs=5,
    )
    for name, value in changes.items():
        setattr(info, name, value)
    state = frontend_pb2.ModelState(ready=True, info=info, cache_root=CACHE_ROOT)
    if info.has_tokenizer:
        state.tokenizer_json = as_json(tokenizer)
    return state


def packed_logprobs(values: Sequence[float], top_k: int) -> dict[str, Any]:
    """The arrays of a logprobs message. Alternative k of a token has id 10 + k and a logprob 0.25 * (k + 1) lower."""
    logprobs = np.array(values, "<f4")
    below = 0.25 * np.arange(1, top_k + 1)
    return {
        "logprobs": logprobs.tobytes(),
        "top_k": top_k,
        "top_token_ids": np.tile(np.arange(10, 10 + top_k, dtype="<i4"), len(values)).tobytes(),
        "top_logprobs": (logprobs[:, None] - below).astype("<f4").tobytes(),
    }


def token_logprobs(
    values: Sequence[float], top_k: int, entries: Sequence[int] | None = None
) -> frontend_pb2.TokenLogprobs:
    """The logprobs of a step's output, for all of its tokens or for those at `entries`."""
    which = np.array(range(len(values)) if entries is None else entries, "<i4")
    return frontend_pb2.TokenLogprobs(entries=which.tobytes(), **packed_logprobs(values, top_k))


def public_logprobs(values: Sequence[float], top_k: int) -> inference_pb2.Logprobs:
    """The same logprobs as the caller gets them."""
    return inference_pb2.Logprobs(
        logprobs=values,
        top_k=top_k,
        top_token_ids=[10 + k for _ in values for k in range(top_k)],
        top_logprobs=[value - 0.25 * (k + 1) for value in values for k in range(top_k)],
    )


def step_output(
    streams: Sequence[int], offsets: Sequence[int], tokens: Sequence[int], **more: Any
) -> frontend_pb2.StepOutput:
    """A step's output with a token at an offset of a stream in each entry."""
    return frontend_pb2.StepOutput(
        streams=np.array(streams, "<u8").tobytes(),
        offsets=np.array(offsets, "<i4").tobytes(),
        tokens=np.array(tokens, "<i4").tobytes(),
        **more,
    )


class FakeCore:
    """A test reads the front end's messages with `expect` and answers them with the other methods."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 16)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self.peer = b""
        # Output tokens sent, by stream.
        self.num_sent: dict[int, int] = {}

    async def expect(self, kind: str) -> Any:
        """The next message. Fails if it is of another kind."""
        async with asyncio.timeout(WAIT_SECONDS):
            self.peer, frame = await self._socket.recv_multipart()
        message = frontend_pb2.FrontendToCore.FromString(frame)
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def is_silent(self, seconds: float = 0.05) -> bool:
        return not await self._socket.poll(int(seconds * 1000))

    async def send(self, **message: Any) -> None:
        await self._socket.send_multipart([self.peer, frontend_pb2.CoreToFrontend(**message).SerializeToString()])

    async def send_raw(self, frame: bytes) -> None:
        await self._socket.send_multipart([self.peer, frame])

    async def greet(self, state: frontend_pb2.ModelState | None = None) -> None:
        await self.expect("hello")
        await self.send(model_state=state or model_state())

    async def admit(self, requests_ahead: int = 0) -> frontend_pb2.Submit:
        submit = await self.expect("submit")
        self.num_sent.update((submit.stream + idx, 0) for idx in range(submit.num_samples))
        await self.send(admitted=frontend_pb2.Admitted(stream=submit.stream, requests_ahead=requests_ahead))
        return submit

    async def reject(self, stream: int, code: str, message: str = "no", **more: Any) -> None:
        rejected = frontend_pb2.RejectCode.Value(f"REJECT_CODE_{code}")
        await self.send(rejected=frontend_pb2.Rejected(stream=stream, code=rejected, message=message, **more))

    async def refuse(self, code: str, message: str = "no", **more: Any) -> frontend_pb2.Submit:
        """Reads a request and rejects it. Returns the request."""
        submit = await self.expect("submit")
        await self.reject(submit.stream, code, message, **more)
        return submit

    async def answer(self, kind: str, reply: str, **fields: Any) -> Any:
        """Reads a query of this kind and answers it. Returns the query."""
        asked = await self.expect(kind)
        await self.send(**{reply: {"query": asked.query, **fields}})
        return asked

    async def output(
        self, stream: int, tokens: Sequence[int], reason: str = "", *, logprobs: Any = None, **end: Any
    ) -> None:
        """Sends a step's output: tokens of one sample, logprobs if given, and the sample's end if a reason is given."""
        offset = self.num_sent[stream]
        self.num_sent[stream] += len(tokens)
        offsets = range(offset, offset + len(tokens))
        await self.output_many(
            [stream] * len(tokens), offsets, tokens, self._end(stream, reason, **end) if reason else None, logprobs
        )

    async def prompt(self, stream: int, start: int, values: Sequence[float], top_k: int = 0) -> None:
        """Sends a step's output with logprobs of a prompt's tokens."""
        piece = frontend_pb2.PromptLogprobs(stream=stream, start=start, **packed_logprobs(values, top_k))
        await self.send(step_output=frontend_pb2.StepOutput(prompt_logprobs=[piece]))

    async def fail(self, stream: int, code: str, message: str) -> None:
        """Sends an end with a failure and without a reason."""
        end = self._end(stream, "UNSPECIFIED")
        end.failure.code = frontend_pb2.FailureCode.Value(f"FAILURE_CODE_{code}")
        end.failure.message = message
        await self.output_many([], [], [], end)

    async def output_many(
        self,
        streams: Sequence[int],
        offsets: Sequence[int],
        tokens: Sequence[int],
        end: frontend_pb2.End | None = None,
        logprobs: frontend_pb2.TokenLogprobs | None = None,
    ) -> None:
        output = step_output(streams, offsets, tokens, ends=[end] if end else [], logprobs=logprobs)
        await self.send(step_output=output)

    def _end(self, stream: int, reason: str, **fields: Any) -> frontend_pb2.End:
        end = frontend_pb2.End(
            stream=stream,
            reason=inference_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"),
            usage=inference_pb2.Usage(prompt_tokens=3, output_tokens=self.num_sent[stream], discarded_tokens=1),
            timing=inference_pb2.Timing(total_seconds=2.0),
        )
        for name, value in fields.items():
            if isinstance(value, Message):
                getattr(end, name).CopyFrom(value)
            else:
                setattr(end, name, value)
        return end

    def close(self) -> None:
        self._context.destroy(linger=0)


class Service:
    """A front end in this process, its fake core, and a channel to it."""

    def __init__(self, core: FakeCore, address: str, front_end: FrontEnd | None) -> None:
        self.core = core
        self.address = address
        # None if it is of another process.
        self.front_end: Any = front_end
        # The event loop of both, of a test that is a coroutine.
        self.runner: Any = None
        # A fixed window of 64 KiB, so that tests can make writes block.
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)])
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)

    def generate(self, *, timeout: float | None = WAIT_SECONDS, metadata: Any = None, **fields: Any) -> Any:
        if not fields.keys() & {"text", "token_ids", "chat"}:
            fields["text"] = "the"
        return self.inference.Generate(inference_pb2.GenerateRequest(**fields), metadata=metadata, timeout=timeout)

    async def model_info(self) -> control_pb2.GetModelInfoResponse:
        return await self.control.GetModelInfo(control_pb2.GetModelInfoRequest())

    async def check(self, name: str = "") -> int:
        """The health of a service, or of the whole server."""
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=name))).status

    def watch(self, name: str = "", metadata: Any = None) -> Any:
        return self.health.Watch(health_pb2.HealthCheckRequest(service=name), metadata=metadata)

    async def leave(self, call: Any) -> frontend_pb2.Cancel:
        """The caller leaves, of which the core hears."""
        call.cancel()
        return await self.core.expect("cancel")

    async def ends(self, call: Any, stream: int) -> None:
        """A stream goes on and ends as it should."""
        await self.core.output(stream, [65], "LENGTH")
        assert [kind for kind, _ in await rest(call)] == ["delta", "finished", "summary"]

    async def start_stream(self, **fields: Any) -> tuple[Any, frontend_pb2.Submit]:
        """A stream that the core has admitted, after its Accepted has been read and its write has ended."""
        call = self.generate(**fields)
        submit = await self.core.admit()
        first = await call.read()
        assert first.WhichOneof("event") == "accepted", first
        if self.front_end is not None:
            stream = self.front_end._streams._samples[submit.stream].stream
            while stream.blocked_since:
                await asyncio.sleep(0)
        return call, submit


def served(*patches: tuple[Any, str, Any], **settings: Any) -> Callable[[Test], Test]:
    """Gives the fixture `s` of a test these settings of `service`, and modules these attributes before it starts."""

    def mark(test: Test) -> Test:
        test.served = patches, settings  # type: ignore[attr-defined]
        return test

    return mark


@asynccontextmanager
async def service(tmp_path: Path, *, ready: bool = True, state: Any = None, tenants: Any = None, **changes: Any) -> Any:
    """A running front end. With `ready`, its core has answered Hello and serves the toy model, to `tenants` if given.

    No refusal is held, because tests are refused more often than callers that make a mistake.
    """
    endpoint = f"ipc://{tmp_path}/core.sock"
    core = FakeCore(endpoint)
    settings: dict[str, Any] = {
        "endpoint": endpoint,
        "listen": "127.0.0.1:0",
        "share_port": False,
        "reflection": False,
        "max_message_bytes": 1 << 20,
        "grace_seconds": 5.0,
    }
    names = {each.name for each in fields(FrontEndSettings)}
    parts = {name: changes.pop(name) for name in changes.keys() - names}
    front_end = FrontEnd(FrontEndSettings(**{**settings, **changes}), **parts)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(front_end.run(listening.set_result))
    under_test = Service(core, await listening, front_end)
    try:
        with patch.object(gate, "MAX_HOLD_SECONDS", 0.0):
            if ready:
                await core.greet(state)
                await until_ready(under_test)
            if tenants is not None:
                await allow(under_test, tenants)
            yield under_test
    finally:
        await under_test.channel.close()
        front_end.stop()
        await running
        core.close()


def stalled_calls(s: Service, count: int, *call: Any) -> RawConnection:
    """So many calls on a connection whose caller reads nothing."""
    stalled = RawConnection(s.address)
    for _ in range(count):
        stalled.call(*call)
    return stalled


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, noted: list[str]) -> None:
    """Adds the name to `noted` whenever this function of `owner` is called."""
    real = getattr(owner, name)

    def noting(*args: Any, **keywords: Any) -> Any:
        noted.append(name)
        return real(*args, **keywords)

    monkeypatch.setattr(owner, name, noting)


async def allow(s: Service, message: frontend_pb2.Tenants) -> None:
    """Returns when the front end has the tokens of these tenants."""
    before = s.front_end._entrance.table
    await s.core.send(tenants=message)
    await until(lambda: s.front_end._entrance.table is not before)


async def until_ready(under_test: Service) -> None:
    """Waits for the model, which is loaded in a thread."""
    async with asyncio.timeout(WAIT_SECONDS):
        while under_test.front_end._loading is None:
            await asyncio.sleep(0)
        await under_test.front_end._loading


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def rest(call: Any, messages: list[Any] | None = None) -> list[Any]:
    """All remaining messages, as (kind, message). They are in `messages` also if the call fails."""
    messages = [] if messages is None else messages
    async with asyncio.timeout(WAIT_SECONDS):
        while (message := await call.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("event")
            messages.append((kind, getattr(message, kind)))
    return messages
