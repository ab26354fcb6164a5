"""The calls that watch what goes on in the core, Drain and UpdateWeights, under one table, with a fake core."""

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2

from scheduler_svc.frontend import control, server
from scheduler_svc.frontend.rpc.calls import CallLimits
from tests.rigs.raw_http2 import RawConnection
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, allow, served, until
from tests.scheduler_svc.frontend.test_door import REVOKED, bearer, listed, only


@dataclass(frozen=True, kw_only=True)
class Kind:
    method: str
    request: Any
    asked: str
    """The name of the message to the core; that of its answers ends with `_reply`."""
    reply: type[Any]
    progress: type[Any]
    not_found: grpc.StatusCode
    wrong: tuple[tuple[Any, str], ...]
    """Requests that the front end refuses, and why."""

    def call(self, s: Service, request: Any = None) -> Any:
        return getattr(s.control, self.method)(request or self.request)

    async def answer(self, s: Service, query: int, **reply: Any) -> None:
        await s.core.send(**{f"{self.asked}_reply": self.reply(query=query, **reply)})

    async def begin(self, s: Service) -> tuple[Any, Any]:
        """A call, and what the core is asked."""
        return self.call(s), await s.core.expect(self.asked)

    async def tell(self, s: Service, call: Any, query: int, seconds: float, **reply: Any) -> None:
        """The core reports once, and the caller reads it."""
        await self.answer(s, query, progress=self.at(seconds), **reply)
        assert await call.read() == self.at(seconds)

    def at(self, seconds: float) -> Any:
        return self.progress(state=1, running=3, waiting=2, seconds=seconds, detail="what")


def update(**changes: Any) -> Any:
    return control_pb2.UpdateWeightsRequest(**{"version": "v1", "folder": "/f"} | changes)


TIME = "max_seconds is {}; it must be between 0 and 86400"
EMPTY = "{} is {!r}; it must not be empty or contain control characters"
KINDS = {
    "drain": Kind(
        method="Drain",
        request=control_pb2.DrainRequest(worker="w", max_seconds=2.5, force=True),
        asked="drain",
        reply=frontend_pb2.DrainReply,
        progress=control_pb2.DrainResponse,
        not_found=Code.NOT_FOUND,
        wrong=((control_pb2.DrainRequest(max_seconds=float("nan")), TIME.format("nan")),),
    ),
    "update": Kind(
        method="UpdateWeights",
        request=update(running=control_pb2.RUNNING_REQUESTS_FINISH, in_turn=True, max_seconds=2.5),
        asked="update_weights",
        reply=frontend_pb2.UpdateWeightsReply,
        progress=control_pb2.UpdateWeightsResponse,
        not_found=Code.PERMISSION_DENIED,
        wrong=(
            (update(version=""), EMPTY.format("version", "")),
            (update(folder="/a\n"), EMPTY.format("folder", "/a\n")),
            (update(max_seconds=86_401), TIME.format(86_401.0)),
        ),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
async def test_the_progress_is_written_as_it_comes_until_the_last_report(s: Service, kind: Kind) -> None:
    call, asked = await kind.begin(s)
    assert asked.request == kind.request and not asked.stop_replies
    for seconds in (0.5, 1.5):
        await kind.tell(s, call, asked.query, seconds)
    await kind.tell(s, call, asked.query, 2.0, is_last=True)
    assert await call.read() is grpc.aio.EOF and await call.code() is Code.OK
    assert await s.core.is_silent()
    assert s.front_end._queries._waiting == {}


@each_kind
async def test_a_refusal_of_the_core_is_the_calls_status(s: Service, kind: Kind) -> None:
    for name, code, told in (
        ("INVALID", Code.INVALID_ARGUMENT, {"field": "worker"}),
        ("NOT_FOUND", kind.not_found, {}),
        ("DUPLICATE", Code.ALREADY_EXISTS, {}),
        ("QUEUE_FULL", Code.RESOURCE_EXHAUSTED, {"retry": 0.5}),
        ("NOT_READY", Code.UNAVAILABLE, {"retry": 1.0}),
        ("QUARANTINED", Code.INTERNAL, {}),
    ):
        call, asked = await kind.begin(s)
        refusal = frontend_pb2.RejectCode.Value(f"REJECT_CODE_{name}")
        await kind.answer(s, asked.query, refusal=refusal, message="why", field="worker")
        await fails(call, code, "why", **told)
    assert await s.core.is_silent()


@each_kind
async def test_a_request_out_of_bounds_never_reaches_the_core(s: Service, kind: Kind) -> None:
    for request, message in kind.wrong:
        await fails(kind.call(s, request), Code.INVALID_ARGUMENT, message, field=message.split()[0])
    assert await s.core.is_silent()


@each_kind
async def test_the_core_is_told_once_that_a_caller_has_left(s: Service, kind: Kind) -> None:
    call, asked = await kind.begin(s)
    await kind.tell(s, call, asked.query, 0.5)
    call.cancel()
    left = await s.core.expect(kind.asked)
    assert left == type(left)(query=asked.query, stop_replies=True)
    # A report that was under way is dropped.
    await kind.answer(s, asked.query, progress=kind.at(1.5))
    assert await s.core.is_silent()
    assert s.front_end._queries._waiting == {}


@each_kind
async def test_a_caller_who_reads_late_gets_the_newest_report_only(s: Service, kind: Kind) -> None:
    call, asked = await kind.begin(s)
    [waiting] = s.front_end._queries._waiting.values()
    # In one turn of the event loop, so that the call cannot write in between.
    for seconds in (0.5, 1.5, 2.5):
        waiting.take(kind.reply(progress=kind.at(seconds)))
    await kind.answer(s, asked.query, progress=kind.at(3.5), is_last=True)
    seen = [one.seconds async for one in call]
    assert seen == [2.5, 3.5]


@each_kind
async def test_the_last_report_is_written_when_the_core_dies_and_then_the_call_fails(s: Service, kind: Kind) -> None:
    call, asked = await kind.begin(s)
    await kind.tell(s, call, asked.query, 0.5)
    s.core.close()
    await fails(call, Code.UNAVAILABLE, "the scheduler's core cannot be reached", retry=1.0)
    assert s.front_end._queries._waiting == {}


@each_kind
@served((control, "REPLY_SECONDS", 0.05))
async def test_a_core_that_says_nothing_is_unavailable_and_told_that_nobody_waits(s: Service, kind: Kind) -> None:
    call, asked = await kind.begin(s)
    await fails(call, Code.UNAVAILABLE, "the scheduler's core has not answered for 0.05 s")
    left = await s.core.expect(kind.asked)
    assert (left.query, left.stop_replies) == (asked.query, True)


@each_kind
@served((server, "SWEEP_SECONDS", 0.02), needs_tokens=True)
async def test_a_watch_ends_when_its_callers_token_is_revoked(s: Service, kind: Kind) -> None:
    kept = listed("kept", "control")
    await allow(s, only(kept, listed("lost", "control")))
    calls, queries = dict[str, Any](), dict[str, int]()
    for name in ("kept", "lost"):
        calls[name] = getattr(s.control, kind.method)(kind.request, metadata=bearer(name))
        queries[name] = (await s.core.expect(kind.asked)).query
        await kind.tell(s, calls[name], queries[name], 0.5)
    await allow(s, only(kept))
    left = await s.core.expect(kind.asked)
    assert (left.query, left.stop_replies) == (queries["lost"], True)
    assert (await calls["lost"].code(), await calls["lost"].details()) == (Code.UNAUTHENTICATED, REVOKED)
    await kind.tell(s, calls["kept"], queries["kept"], 1.5, is_last=True)
    assert await calls["kept"].code() is Code.OK


@each_kind
@served((server, "SWEEP_SECONDS", 0.02), call_limits=CallLimits(answer_seconds=1000.0))
async def test_a_caller_who_reads_nothing_is_given_up(s: Service, kind: Kind) -> None:
    # grpc.aio keeps references to the first call of a method and to the newest one.
    first = kind.call(s)
    asked = await s.core.expect(kind.asked)
    await kind.answer(s, asked.query, progress=kind.at(0.5), is_last=True)
    assert [one async for one in first] == [kind.at(0.5)]
    stalled = RawConnection(s.address)
    stalled.call(f"/tandem.v1.ControlService/{kind.method}", kind.request.SerializeToString())
    unread = await s.core.expect(kind.asked)
    idle = kind.call(s)
    newest = await s.core.expect(kind.asked)
    for _ in range(2):
        await kind.answer(s, unread.query, progress=kind.at(0.5))
    await until(lambda: any(each.blocked_since for each in s.front_end._queries.watches))
    s.front_end._call_limits = CallLimits(answer_seconds=0.0)
    left = await s.core.expect(kind.asked)
    assert left == type(left)(query=unread.query, stop_replies=True)
    # A watch that has nothing to write is not late.
    s.front_end._call_limits = CallLimits(answer_seconds=1000.0)
    await kind.answer(s, newest.query, progress=kind.at(1.5), is_last=True)
    assert [one async for one in idle] == [kind.at(1.5)]
    stalled.close()


async def test_both_are_watched_at_once_beside_other_queries(s: Service) -> None:
    """Every query has a number of its own, for either method."""
    calls, queries = dict[str, Any](), dict[str, int]()
    for name, kind in KINDS.items():
        calls[name] = kind.call(s)
        queries[name] = (await s.core.expect(kind.asked)).query
    load: Any = s.control.GetLoad(control_pb2.GetLoadRequest())
    asked = (await s.core.answer("load_query", "load_reply")).query
    assert len({*queries.values(), asked}) == 3
    await load
    for number, (name, kind) in enumerate(KINDS.items()):
        await kind.answer(s, queries[name], progress=kind.at(number), is_last=True)
    for number, (name, kind) in enumerate(KINDS.items()):
        assert [one async for one in calls[name]] == [kind.at(number)]
