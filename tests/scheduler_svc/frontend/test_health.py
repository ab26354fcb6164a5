"""Health: one state, told to those who ask and those who watch; nobody's watch delays another's."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend import health, server
from scheduler_svc.frontend.readiness import SERVICES
from scheduler_svc.frontend.rpc.calls import CallLimits
from tests.rigs.raw_http2 import RawConnection
from tests.scheduler_svc.frontend.failures import assert_retry_hint, failure
from tests.scheduler_svc.frontend.fake_core import WAIT_SECONDS, Service

Run = Callable[..., None]
State = health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"


def stub_of(s: Service) -> Any:
    return health_pb2_grpc.HealthStub(s.channel)


async def check(s: Service, name: str = "") -> int:
    return (await stub_of(s).Check(health_pb2.HealthCheckRequest(service=name))).status


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not what():
            await asyncio.sleep(0.005)


def test_stalled_watches_delay_neither_check_nor_other_watches(run: Run):
    async def scenario(s: Service) -> None:
        # No message fits these callers' windows, so the write of every state is blocked.
        stalled = RawConnection(s.address)
        for _ in range(50):
            stalled.call(WATCH, b"")
        watches = s.front_end._health
        await until(lambda: watches.num_watches == 50)
        watch = stub_of(s).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == State.SERVING
        s.front_end._readiness.drain()
        # Stored before `drain` returned.
        assert await check(s) == State.NOT_SERVING
        assert (await watch.read()).status == State.NOT_SERVING
        watch.cancel()
        stalled.close()
        await until(lambda: watches.num_watches == 0)

    run(scenario)


def test_a_watch_that_was_stalled_gets_the_newest_state_alone(run: Run, monkeypatch: pytest.MonkeyPatch):
    async def scenario(s: Service) -> None:
        readiness, may_write, written = s.front_end._readiness, asyncio.Event(), list[int]()

        class Stalled:
            async def write(self, message: State) -> None:
                await may_write.wait()
                written.append(message.status)

        watching = asyncio.create_task(s.front_end._health.Watch(health_pb2.HealthCheckRequest(), Stalled()))
        await asyncio.sleep(0)
        for sentence in ("a", "", "b", "", "c"):
            readiness.set_core_status(frontend_pb2.CoreStatus(not_serving=sentence))
        may_write.set()
        await until(lambda: len(written) == 2)
        # The state at its beginning, whose write was blocked, and the last one.
        assert written == [State.SERVING, State.NOT_SERVING]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run(scenario)


def test_an_unknown_name_is_answered_and_not_remembered(run: Run):
    async def scenario(s: Service) -> None:
        watches = s.front_end._health
        before = vars(watches)["_services"]
        for idx in range(20):
            watch = stub_of(s).Watch(health_pb2.HealthCheckRequest(service=f"no.such.Service{idx}"))
            assert (await watch.read()).status == State.SERVICE_UNKNOWN
            watch.cancel()
            request = health_pb2.HealthCheckRequest(service=f"no.such.Service{idx}")
            error = await failure(stub_of(s).Check(request))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert f"no.such.Service{idx}" in error.details()
        await until(lambda: watches.num_watches == 0)
        assert vars(watches)["_services"] == before == frozenset(SERVICES)

    run(scenario)


def test_list_has_every_service(run: Run):
    async def scenario(s: Service) -> None:
        statuses = (await stub_of(s).List(health_pb2.HealthListRequest())).statuses
        assert {name: one.status for name, one in statuses.items()} == dict.fromkeys(SERVICES, State.SERVING)

    run(scenario)


def test_watches_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "MAX_WATCHES", 3)

    async def scenario(s: Service) -> None:
        watches = [stub_of(s).Watch(health_pb2.HealthCheckRequest()) for _ in range(3)]
        for watch in watches:
            await watch.read()
        error = await failure(stub_of(s).Watch(health_pb2.HealthCheckRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "3 health watches are open; the limit is 3"
        assert_retry_hint(error, 0.5)
        assert await check(s) == State.SERVING
        watches[0].cancel()
        await until(lambda: s.front_end._health.num_watches == 2)
        last = stub_of(s).Watch(health_pb2.HealthCheckRequest())
        assert (await last.read()).status == State.SERVING
        for watch in (*watches, last):
            watch.cancel()

    run(scenario)


def test_the_default_bound_is_1000_watches():
    assert health.MAX_WATCHES == 1000


def test_watches_that_take_no_state_are_cancelled(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.02)

    async def scenario(s: Service) -> None:
        # grpc.aio holds on to its first call and to the newest one.
        await check(s)
        stalled = RawConnection(s.address)
        for _ in range(5):
            stalled.call(WATCH, b"")
        await until(lambda: s.front_end._health.num_watches == 5)
        await until(lambda: s.front_end._health.num_watches == 0)
        await check(s)
        assert len(await asyncio.to_thread(stalled.wait_ends, 5)) == 5
        stalled.close()

    run(scenario, call_limits=CallLimits(answer_seconds=0.2))


def test_a_core_that_does_not_serve_is_not_serving_with_its_reason(run: Run):
    why = "the worker died 5 times in 60 s without a confirmed token: out of memory"

    async def scenario(s: Service) -> None:
        watch = stub_of(s).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == State.SERVING
        await s.core.send(core_status=frontend_pb2.CoreStatus(not_serving=why))
        assert (await watch.read()).status == State.NOT_SERVING
        assert await check(s) == State.NOT_SERVING
        error = await failure(s.generate())
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, why)
        assert_retry_hint(error, 1.0)
        assert await not_serving(s) == why
        await s.core.send(core_status=frontend_pb2.CoreStatus())
        assert (await watch.read()).status == State.SERVING
        assert await not_serving(s) == ""
        await s.start_stream()
        watch.cancel()

    run(scenario)


async def not_serving(s: Service) -> str:
    """What GetLoad says of it."""
    call: Any = asyncio.ensure_future(s.control.GetLoad(control_pb2.GetLoadRequest()))
    query = await s.core.expect("load_query")
    await s.core.send(load_reply=frontend_pb2.LoadReply(query=query.query))
    return (await call).not_serving


def test_get_load_says_why_as_the_refusal_does(run: Run):
    async def scenario(s: Service) -> None:
        await s.core.expect("hello")
        error = await failure(s.generate())
        assert await not_serving(s) == error.details() == "no worker has joined yet; there is no model to serve"
        await s.core.send(draining=frontend_pb2.Draining())
        await until(lambda: s.front_end._readiness.why_not_serving != error.details())
        error = await failure(s.generate())
        assert await not_serving(s) == error.details()
        assert "shutting down" in error.details()

    run(scenario, ready=False)


@pytest.mark.parametrize("method", ["Check", "List", "Watch"])
@pytest.mark.parametrize(("sent", "said"), [(b"\xff\xff\xff", "the 3 bytes sent are not a"), (b"\xc0\x3e\x05", "1000")])
def test_malformed_health_calls_are_invalid_arguments_and_leave_no_traceback(
    run: Run, caplog: pytest.LogCaptureFixture, method: str, sent: bytes, said: str
):
    async def scenario(s: Service) -> None:
        call = s.channel.unary_stream(f"/grpc.health.v1.Health/{method}")(sent)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in error.details()

    with caplog.at_level(logging.WARNING):
        run(scenario)
    assert caplog.records == []
