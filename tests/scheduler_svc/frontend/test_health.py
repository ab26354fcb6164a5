"""Health: one state for Check and Watch; a stalled Watch call delays no other call."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.door.tenant import ALL_RIGHTS
from scheduler_svc.frontend import readiness, server
from scheduler_svc.frontend.entrance import Entrance
from scheduler_svc.frontend.readiness import SERVICES, HealthServicer, Readiness
from scheduler_svc.frontend.rpc.calls import CallLimits
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, served, stalled_calls, until

State = health_pb2.HealthCheckResponse
WATCH = "/grpc.health.v1.Health/Watch"


async def test_stalled_watches_delay_neither_check_nor_other_watches(s: Service) -> None:
    # The windows of these callers are too small for a message, so every write is blocked.
    stalled = stalled_calls(s, 50, WATCH, b"")
    watches = s.front_end._health
    await until(lambda: len(watches.watches) == 50)
    watch = s.watch()
    assert (await watch.read()).status == State.SERVING
    s.front_end._readiness.drain()
    # `drain` stored the state before it returned.
    assert await s.check() == State.NOT_SERVING
    assert (await watch.read()).status == State.NOT_SERVING
    watch.cancel()
    stalled.close()
    await until(lambda: len(watches.watches) == 0)


async def test_a_stalled_watch_gets_only_the_newest_state(s: Service) -> None:
    readiness, may_write, written = s.front_end._readiness, asyncio.Event(), list[int]()

    class Stalled:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def write(self, message: State) -> None:
            await may_write.wait()
            written.append(message.status)

    Entrance(needs_tokens=False).enter(ALL_RIGHTS, None)
    watching = asyncio.create_task(s.front_end._health.Watch(health_pb2.HealthCheckRequest(), Stalled()))
    await asyncio.sleep(0)
    for sentence in ("a", "", "b", "", "c"):
        readiness.set_core_status(frontend_pb2.CoreStatus(not_serving=sentence))
    may_write.set()
    await until(lambda: len(written) == 2)
    # The first state (its write was blocked) and the newest one.
    assert written == [State.SERVING, State.NOT_SERVING]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_an_unknown_service_name_is_answered_and_not_stored(s: Service) -> None:
    watches = s.front_end._health
    for idx in range(20):
        name = f"no.such.Service{idx}"
        watch = s.watch(name)
        assert (await watch.read()).status == State.SERVICE_UNKNOWN
        watch.cancel()
        assert name in await fails(s.health.Check(health_pb2.HealthCheckRequest(service=name)), Code.NOT_FOUND)
    await until(lambda: len(watches.watches) == 0)
    assert (await s.health.List(health_pb2.HealthListRequest())).statuses.keys() == set(SERVICES)


async def test_list_returns_every_service(s: Service) -> None:
    statuses = (await s.health.List(health_pb2.HealthListRequest())).statuses
    assert {name: one.status for name, one in statuses.items()} == dict.fromkeys(SERVICES, State.SERVING)


@served((readiness, "MAX_WATCHES", 3))
async def test_watches_above_the_limit_are_refused(s: Service) -> None:
    watches = [s.watch() for _ in range(3)]
    for watch in watches:
        await watch.read()
    await fails(s.watch(), Code.RESOURCE_EXHAUSTED, "3 health watches are open; the limit is 3", retry=0.5)
    assert await s.check() == State.SERVING
    watches[0].cancel()
    await until(lambda: len(s.front_end._health.watches) == 2)
    last = s.watch()
    assert (await last.read()).status == State.SERVING


@served((readiness, "MAX_OWN_WATCHES", 3))
async def test_unread_watches_of_a_connection_leave_those_of_others(s: Service) -> None:
    hostile = stalled_calls(s, 10, WATCH, b"")
    # The refused ones have ended.
    assert len(await asyncio.to_thread(hostile.wait_ends, 7)) == 7
    assert len(s.front_end._health.watches) == 3
    watch = s.watch()
    assert (await watch.read()).status == State.SERVING
    hostile.close()
    await until(lambda: s.front_end._health._of_connection.num_taken == 1)
    watch.cancel()
    await until(lambda: s.front_end._health._of_connection.num_taken == 0)


@served((server, "SWEEP_SECONDS", 0.02), call_limits=CallLimits(answer_seconds=1000.0))
async def test_watches_with_unread_answers_are_cancelled(s: Service) -> None:
    # grpc.aio keeps references to the first call of Watch and to its newest call.
    first = s.watch()
    await first.read()
    first.cancel()
    idle = s.watch()
    await idle.read()
    stalled = stalled_calls(s, 5, WATCH, b"")
    await until(lambda: len(s.front_end._health.watches) == 6)
    s.front_end._call_limits = CallLimits(answer_seconds=0.0)
    await until(lambda: len(s.front_end._health.watches) == 1)
    await s.check()
    assert len(await asyncio.to_thread(stalled.wait_ends, 5)) == 5
    # A watch that has nothing to send is not late.
    assert len(s.front_end._health.watches) == 1 and not idle.done()
    idle.cancel()
    stalled.close()


async def test_health_is_not_serving_while_the_core_reports_a_reason(s: Service) -> None:
    why = "the worker died 5 times in 60 s without a confirmed token: out of memory"
    watch = s.watch()
    assert (await watch.read()).status == State.SERVING
    await s.core.send(core_status=frontend_pb2.CoreStatus(not_serving=why, refuses=True))
    assert (await watch.read()).status == State.NOT_SERVING
    assert await s.check() == State.NOT_SERVING
    await fails(s.generate(), Code.UNAVAILABLE, why, retry=1.0)
    assert (await load_of(s)).not_serving == why
    await s.core.send(core_status=frontend_pb2.CoreStatus())
    assert (await watch.read()).status == State.SERVING
    assert not (await load_of(s)).not_serving
    await s.start_stream()


async def test_requests_wait_while_no_worker_computes_and_all_words_of_health_agree(s: Service) -> None:
    why = "no worker is connected; the last one, w-1, was lost: killed"
    status = frontend_pb2.CoreStatus(
        not_serving=why, reason=inference_pb2.WAIT_REASON_WORKER_LOST, not_serving_seconds=30.0
    )
    before = time.time() - 30.0
    await s.core.send(core_status=status)
    await until(lambda: s.front_end._readiness.not_serving is not None)
    after = time.time() - 30.0
    for name in SERVICES:
        check: Any = s.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert (await check).status == State.NOT_SERVING
        metadata = dict(await check.trailing_metadata())
        assert metadata["tandem-reason"] == "worker_lost"
        assert before - 0.001 <= float(metadata["tandem-since"]) <= after + 0.001
    load = await load_of(s)
    assert (load.not_serving, load.not_serving_reason) == (why, inference_pb2.WAIT_REASON_WORKER_LOST)
    assert before <= load.not_serving_since <= after
    call, submit = await s.start_stream()
    stream = submit.stream
    waits = frontend_pb2.Wait(
        reason=inference_pb2.WAIT_REASON_WORKER_LOST, message=why, streams=[stream, 999], seconds=[2.0, 1.0]
    )
    now = time.time()
    await s.core.send(waits=frontend_pb2.Waits(waits=[waits]))
    waiting = (await call.read()).waiting
    assert (waiting.reason, waiting.message) == (inference_pb2.WAIT_REASON_WORKER_LOST, why)
    assert now - 2.0 <= waiting.since <= time.time() - 2.0
    # In the middle of an answer, too.
    await s.core.output(stream, [66])
    assert (await call.read()).delta.token_ids == [66]
    await s.core.send(waits=frontend_pb2.Waits(waits=[waits]))
    assert (await call.read()).HasField("waiting")
    # The time since which nothing is computed does not begin again with another reason.
    await s.core.send(core_status=frontend_pb2.CoreStatus(not_serving="another", not_serving_seconds=1.0))
    await until(lambda: s.front_end._readiness.not_serving.message == "another")
    assert before <= (await load_of(s)).not_serving_since <= after
    await s.core.send(core_status=frontend_pb2.CoreStatus())
    await until(lambda: s.front_end._readiness.not_serving is None)
    load = await load_of(s)
    assert not load.not_serving and not load.HasField("not_serving_since") and not load.not_serving_reason


def test_the_front_end_says_what_the_core_says_and_what_the_core_cannot_know(monkeypatch: pytest.MonkeyPatch):
    """The reason, the time, and whether new requests are refused, in the order of a service's life."""
    now = [1000.0]
    monkeypatch.setattr(readiness.time, "time", lambda: now[0])
    health_of = HealthServicer()
    under_test, seen = Readiness(health_of), list[tuple[str, float, bool]]()

    def look() -> None:
        now[0] += 1.0
        why = under_test.not_serving
        seen.append(("" if why is None else why.name, under_test.since, bool(under_test.requests._closed)))
        assert (health_of._state == State.SERVING) == (why is None)

    def core(reason: str = "", seconds: float = 0.0, *, refuses: bool = False) -> None:
        value = inference_pb2.WaitReason.Value(f"WAIT_REASON_{reason or 'UNSPECIFIED'}")
        sent = frontend_pb2.CoreStatus(not_serving=reason, reason=value, not_serving_seconds=seconds, refuses=refuses)
        under_test.set_core_status(sent)

    look()
    for happens in (
        lambda: core("WORKER_STARTING"),
        core,
        lambda: under_test.set_model(cast(Any, SimpleNamespace(tokenizer=None))),
        lambda: core("WORKER_LOST", seconds=0.5),
        lambda: core("WEIGHTS_REFUSED", seconds=2.5),
        core,
        lambda: core("CRASH_LOOP", refuses=True),
        under_test.lose_core,
        lambda: core("WORKER_LOST", seconds=1.0),
        under_test.drain,
    ):
        happens()
        look()
    assert seen == [
        ("no_worker", 1000.0, True),
        ("worker_starting", 1000.0, True),
        ("loading_model", 1000.0, True),
        ("", 1000.0, False),
        ("worker_lost", 1003.5, False),
        # The first time counts, for all reasons.
        ("weights_refused", 1002.5, False),
        ("", 1002.5, False),
        ("crash_loop", 1007.0, True),
        ("scheduler_lost", 1007.0, True),
        ("worker_lost", 1007.0, True),
        ("shutting_down", 1007.0, True),
    ]


async def load_of(s: Service) -> control_pb2.GetLoadResponse:
    call: Any = s.control.GetLoad(control_pb2.GetLoadRequest())
    await s.core.answer("load_query", "load_reply")
    return await call


@pytest.mark.parametrize("method", ["Check", "List", "Watch"])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [(b"\xff\xff\xff", "the message of 3 bytes is not a valid"), (b"\xc0\x3e\x05", "1000")],
    ids=["not a message", "unknown field"],
)
async def test_malformed_health_calls_are_invalid_arguments_without_a_traceback(
    s: Service, caplog: pytest.LogCaptureFixture, method: str, sent: bytes, expected: str
) -> None:
    with caplog.at_level(logging.WARNING):
        call = s.channel.unary_stream(f"/grpc.health.v1.Health/{method}")(sent)
        assert expected in await fails(call, Code.INVALID_ARGUMENT)
        await until(lambda: not s.front_end._calls._finished)
    assert caplog.records == []
