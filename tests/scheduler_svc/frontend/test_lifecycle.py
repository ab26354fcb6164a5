"""Readiness, health, draining, and the loss and return of the core."""

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2_grpc
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import core_link, model
from scheduler_svc.frontend.chat.forms import AnswerForm
from scheduler_svc.frontend.readiness import SERVICES
from scheduler_svc.frontend.streaming import sender
from scheduler_svc.frontend.text.tokenizer import Tokenizer
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import Code, fails, failure
from tests.scheduler_svc.frontend.fake_core import (
    WAIT_SECONDS,
    FakeCore,
    Service,
    model_state,
    note_calls,
    rest,
    served,
    service,
    until,
    until_ready,
)
from tests.scheduler_svc.frontend.test_health import load_of
from tests.scheduler_svc.frontend.tokenizers_for_tests import spell

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(s: Service) -> list[Any]:
    return [await s.check(name) for name in SERVICES]


@served(ready=False)
async def test_before_a_worker_joins_calls_are_unavailable_with_a_retry_hint(s: Service) -> None:
    watch = s.watch()
    assert (await watch.read()).status == NOT_SERVING
    await s.core.greet(frontend_pb2.ModelState(ready=False))
    for call in (
        s.generate(),
        s.inference.Tokenize(pb.TokenizeRequest(text="a")),
        s.inference.Detokenize(pb.DetokenizeRequest(token_ids=[1])),
        s.model_info(),
    ):
        await fails(call, Code.UNAVAILABLE, "no worker has joined yet, so there is no model to serve", retry=1.0)
    assert (await load_of(s)).not_serving == "no worker has joined yet, so there is no model to serve"
    assert await health_of(s) == [NOT_SERVING] * 3

    await s.core.send(model_state=model_state())
    assert (await watch.read()).status == SERVING
    assert await health_of(s) == [SERVING] * 3
    await s.start_stream()


async def test_draining_refuses_new_requests_and_completes_running_ones(s: Service) -> None:
    call, submit = await s.start_stream()
    watch = s.watch()
    assert (await watch.read()).status == SERVING
    await s.core.send(draining=frontend_pb2.Draining())
    assert (await watch.read()).status == NOT_SERVING
    assert await health_of(s) == [NOT_SERVING] * 3
    why = await fails(s.generate(), Code.UNAVAILABLE, retry=1.0)
    assert (await load_of(s)).not_serving == why and "shutting down" in why
    await s.ends(call, submit.stream)
    # A model state of a worker that joins late does not make the service ready again.
    await s.core.send(model_state=model_state())
    await until_ready(s)
    assert await health_of(s) == [NOT_SERVING] * 3


@served(ready=False)
async def test_the_newest_model_is_served_if_an_older_one_is_slow(s: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    load, first_began, first_may_end, num_loads = model.load, threading.Event(), threading.Event(), 0

    def slow_at_first(
        state: frontend_pb2.ModelState, before: model.Model | None, answers: AnswerForm | None
    ) -> model.Model:
        nonlocal num_loads
        num_loads += 1
        if state.info.max_length == 101:
            first_began.set()
            assert first_may_end.wait(WAIT_SECONDS)
        if state.info.max_length == 104:
            raise ValueError("no model")
        return load(state, before, answers)

    monkeypatch.setattr(model, "load", slow_at_first)
    await s.core.expect("hello")
    await s.core.send(model_state=model_state(max_length=101))
    assert await asyncio.to_thread(first_began.wait, 10)
    # Workers of other sizes join while the first model's tokenizer is loaded.
    for max_length in (102, 103, 104, 105):
        await s.core.send(model_state=model_state(max_length=max_length))
    load_query: Any = s.control.GetLoad(control_pb2.GetLoadRequest())
    # All states have arrived, because the core's frames are handled in order.
    await s.core.answer("load_query", "load_reply")
    await load_query
    first_may_end.set()
    await until_ready(s)
    assert (await s.model_info()).max_length == 105 and num_loads == 2
    # A model that cannot be loaded leaves the one before it in place, and later models are still loaded.
    await s.core.send(model_state=model_state(max_length=104))
    await until_ready(s)
    await s.core.send(model_state=model_state(max_length=106))
    while (await s.model_info()).max_length != 106:
        await asyncio.sleep(0)


async def sizes_become(s: Service, max_length: int, recent_max_length: int) -> None:
    """A worker joins or leaves."""
    state = model_state(max_length=max_length)
    state.recent_max_length = recent_max_length
    await s.core.send(model_state=state)
    model = s.front_end._readiness.model
    await until(lambda: (model().info.max_length, model().sizes.length) == (max_length, recent_max_length))


@served(ready=False)
async def test_limits_follow_workers_and_a_tokenizer_is_parsed_once(
    s: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = list[str]()
    note_calls(monkeypatch, Tokenizer, "__init__", parsed)
    await s.core.greet()
    await until_ready(s)
    # The larger worker left; one that can hold 100 tokens remains.
    await sizes_become(s, 100, 512)
    assert (await s.model_info()).max_length == 100
    # The core answers a request that fits only the worker that left recently.
    call = s.generate(token_ids=pb.TokenIds(ids=[1] * 300))
    submit = await s.core.expect("submit")
    assert len(submit.prompt) == 4 * 300
    await s.core.reject(submit.stream, "NOT_READY")
    await fails(call, Code.UNAVAILABLE, retry=1.0)
    assert "the limit is 511" in await fails(s.generate(token_ids=pb.TokenIds(ids=[1] * 512)), Code.INVALID_ARGUMENT)
    # After some time its size no longer counts, and a larger worker joins.
    await sizes_become(s, 100, 100)
    assert "the limit is 99" in await fails(s.generate(token_ids=pb.TokenIds(ids=[1] * 300)), Code.INVALID_ARGUMENT)
    await sizes_become(s, 1024, 1024)
    call, submit = await s.start_stream(text="the" * 600)
    assert submit.max_new_tokens == 100
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("num_prompt", "asked", "sent", "in_force"),
    [
        # The default fits the workers that are present. For a longer prompt it fits the worker that left.
        (90, None, 10, 10),
        (150, None, 50, 50),
        # A requested number is sent unchanged, up to the length of the worker that left.
        (90, 60, 60, 60),
        (90, 500, 200, 110),
    ],
)
async def test_max_new_tokens_fit_the_workers(
    s: Service, num_prompt: int, asked: int | None, sent: int, in_force: int
) -> None:
    await sizes_become(s, 100, 200)
    stop = pb.StopParams() if asked is None else pb.StopParams(max_new_tokens=asked)
    call = s.generate(token_ids=pb.TokenIds(ids=[1] * num_prompt), stop=stop)
    submit = await s.core.admit()
    assert submit.max_new_tokens == sent
    assert (await call.read()).accepted.max_new_tokens == in_force


@served(ready=False, secret=b"s" * 32)
async def test_hello_carries_the_secret(s: Service) -> None:
    assert (await s.core.expect("hello")).secret == b"s" * 32
    assert "ssss" not in repr(s.front_end._settings)


async def test_stop_refuses_new_requests_and_completes_running_ones(s: Service) -> None:
    call, submit = await s.start_stream()
    s.front_end.stop()
    await fails(s.generate(), Code.UNAVAILABLE)
    await s.ends(call, submit.stream)


async def test_a_lost_core_fails_its_streams_and_a_new_core_serves(tmp_path: Path) -> None:
    async with service(tmp_path) as s:
        call, submit = await s.start_stream(stop=pb.StopParams(stop_strings=["bx"]))
        stopped, stopped_submit = await s.start_stream(stop=pb.StopParams(stop_strings=["a"]))
        unanswered = s.generate()
        await s.core.expect("submit")
        load: Any = s.control.GetLoad(control_pb2.GetLoadRequest())
        await s.core.expect("load_query")
        await s.core.output(submit.stream, spell(b"ab"))
        await s.core.output(stopped_submit.stream, spell(b"a"))
        first_peer = s.core.peer
        s.core.close()
        # Received tokens and held text are delivered.
        assert (await call.read()).delta == pb.Delta(token_ids=spell(b"ab"), text="a")
        assert (await call.read()).delta == pb.Delta(token_offset=2, text="b")
        for lost in (call, stopped, unanswered, load):
            await fails(lost, Code.UNAVAILABLE, retry=1.0)
        assert await health_of(s) == [NOT_SERVING] * 3
        assert "core is gone" in await fails(s.generate(), Code.UNAVAILABLE)
        assert (await failure(s.control.GetLoad(control_pb2.GetLoadRequest()))).code() is (Code.UNAVAILABLE)

        s.core = FakeCore(f"ipc://{tmp_path}/core.sock")
        try:
            loaded_before = s.front_end._loading
            await s.core.greet()
            assert s.core.peer != first_peer
            while s.front_end._loading is loaded_before:
                await asyncio.sleep(0)
            await until_ready(s)
            assert await health_of(s) == [SERVING] * 3
            call, submit = await s.start_stream()
            await s.ends(call, submit.stream)
        finally:
            s.core.close()


async def test_frames_received_before_the_loss_of_the_core_are_handled(tmp_path: Path) -> None:
    async with service(tmp_path) as s:
        call, submit = await s.start_stream()
        for _ in range(99):
            await s.core.output(submit.stream, spell(b"a"))
        await s.core.output(submit.stream, spell(b"a"), "LENGTH")
        # The loop is blocked while the frames travel, so that they arrive together with the end of the connection.
        time.sleep(0.2)
        s.core.close()
        time.sleep(0.2)
        messages = await rest(call)
        assert sum(len(delta.token_ids) for _, delta in messages[:-2]) == 100
        assert [kind for kind, _ in messages[-2:]] == ["finished", "summary"]


@served((sender, "ANSWER_SECONDS", 0.05))
async def test_a_request_that_the_core_never_answers_is_unavailable(s: Service) -> None:
    call = s.generate()
    submit = await s.core.expect("submit")
    await fails(call, Code.UNAVAILABLE, retry=1.0)
    assert (await s.core.expect("cancel")).stream == submit.stream


@served(ready=False)
async def test_retries_of_grpc_obey_the_retry_hint(s: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"maxAttempts": 5, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1}
    policy["retryableStatusCodes"] = ["UNAVAILABLE"]
    config = {"methodConfig": [{"name": [{"service": "tandem.v1.InferenceService"}], "retryPolicy": policy}]}
    await s.core.expect("hello")
    loop, asked = asyncio.get_running_loop(), list[str]()
    note_calls(monkeypatch, s.front_end._readiness, "admit", asked)
    async with grpc.aio.insecure_channel(s.address, options=[("grpc.service_config", json.dumps(config))]) as channel:
        started = loop.time()
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="a"), timeout=WAIT_SECONDS)
        await until(lambda: bool(asked))
        await s.core.send(model_state=model_state())
        await s.core.admit()
        assert (await call.read()).WhichOneof("event") == "accepted"
        assert loop.time() - started >= 1.0


async def test_a_core_that_reads_nothing_counts_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_link, "HIGH_WATER_MARK", 2)

    def on_message(message: frontend_pb2.CoreToFrontend) -> None:
        raise AssertionError(message)

    core = FakeCore(f"ipc://{tmp_path}/core.sock")
    link, lost = core_link.CoreLink(f"ipc://{tmp_path}/core.sock"), asyncio.Event()
    assert not link.send(frontend_pb2.FrontendToCore())
    running = asyncio.create_task(link.run(on_message, lost.set))
    await core.expect("hello")
    # The core stops reading, so its queue, the kernel's and the front end's fill up.
    big = frontend_pb2.FrontendToCore(submit=frontend_pb2.Submit(prompt=bytes(1 << 20)))
    num_sent = 0
    while link.send(big):
        num_sent += 1
        assert num_sent < 2000
        await asyncio.sleep(0)
    await asyncio.wait_for(lost.wait(), TIMEOUT_SECONDS)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    core.close()
