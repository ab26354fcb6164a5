"""Calls that are refused before any work, lack their message, or leave their answer unread; and many calls at once."""

import asyncio
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from tandem.internal.v1 import frontend_pb2
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from scheduler_svc.frontend import core_link, readiness, server
from scheduler_svc.frontend import validate as validation
from scheduler_svc.frontend.grpc_tuning import sockets
from scheduler_svc.frontend.rpc import calls as parsing
from scheduler_svc.frontend.rpc.calls import MAX_SMALL_BYTES, CallLimits, Room, is_not_of_a_lost_caller
from scheduler_svc.frontend.streaming import sender
from scheduler_svc.frontend.streaming.stream import StreamLimits
from scheduler_svc.frontend.text import tokenizer
from tests.rigs.raw_http2 import HEADERS, RawConnection
from tests.scheduler_svc.frontend.failures import Code, assert_retry_hint, fails, failure
from tests.scheduler_svc.frontend.fake_core import Service, model_state, note_calls, served, service, until

GENERATE = "/tandem.v1.InferenceService/Generate"
GET_MODEL_INFO = "/tandem.v1.ControlService/GetModelInfo"
CHECK = "/grpc.health.v1.Health/Check"
FULL = "4 requests wait; the limit is 4"
PLACES = {"max_without_message": 8, "max_without_message_reserved": 8, "max_reading": 4, "max_reading_reserved": 4}


@pytest.fixture(autouse=True)
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.02)


def raw_caller(s: Service, source: str = "") -> closing[RawConnection]:
    return closing(RawConnection(s.address, source=source))


async def waits(event: asyncio.Event) -> Any:
    """The messages of a caller that sends one after this event."""
    await event.wait()
    yield b""


def num_waiting(s: Service, *rooms: Room) -> int:
    """The calls of these rooms, or of all, that have not sent their message."""
    return sum(s.front_end._calls.rooms[room].without_message.num_taken for room in rooms or Room)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that requests reach on their way to the core."""
    noted: list[str] = []
    for owner, name in (
        (parsing, "parse"),
        (validation, "check_request"),
        (tokenizer.Tokenizer, "encode"),
        (validation, "hash_pages"),
        (sender, "make_outputs"),
    ):
        note_calls(monkeypatch, owner, name, noted)
    return noted


async def queue_is(s: Service, sentence: str) -> None:
    """Reports a full queue, or an empty sentence for room. Returns when the front end has stored it."""
    await s.core.send(core_status=frontend_pb2.CoreStatus(queue_full=sentence, workers=1))
    await until(lambda: s.front_end._readiness._core_status.queue_full == sentence)


async def test_a_full_queue_refuses_before_any_work_on_the_request(s: Service, reached: list[str]) -> None:
    await queue_is(s, FULL)
    for _ in range(20):
        call = s.generate(text="the " * 100, stop=pb.StopParams(stop_strings=["x"]))
        await fails(call, Code.RESOURCE_EXHAUSTED, FULL, retry=0.5)
    assert reached == []
    assert await s.core.is_silent()
    # A full queue does not change health.
    assert await s.check() == health_pb2.HealthCheckResponse.SERVING

    await queue_is(s, "")
    reached.clear()
    call, submit = await s.start_stream(text="the " * 20, stop=pb.StopParams(stop_strings=["x"]))
    await s.ends(call, submit.stream)
    assert reached == ["parse", "check_request", "encode", "hash_pages", "make_outputs"]


async def test_a_full_queue_says_when_to_try_again(s: Service) -> None:
    for seconds in (7.5, 30.25):
        status = frontend_pb2.CoreStatus(queue_full=FULL, workers=1, retry_seconds=seconds)
        await s.core.send(core_status=status)
        await until(lambda seconds=seconds: s.front_end._readiness._core_status.retry_seconds == seconds)
        assert_retry_hint(await failure(s.generate()), seconds)


async def queue_has(s: Service, places: int) -> None:
    """Reports places in a queue that was full. Returns when the front end has stored it."""
    known = s.front_end._readiness
    before = known._core_status
    await s.core.send(core_status=frontend_pb2.CoreStatus(workers=1, places=places))
    await until(lambda: known._core_status is not before and known._core_status.places == places)


@served((readiness, "BELIEVED_SECONDS", 1000.0))
async def test_no_more_requests_are_let_in_than_the_queue_has_places(s: Service, reached: list[str]) -> None:
    await s.core.send(core_status=frontend_pb2.CoreStatus(queue_full=FULL, workers=1, retry_seconds=7.5))
    # The core tells the places again while they are counted.
    await queue_has(s, 1)
    await queue_has(s, 2)
    with raw_caller(s) as caller:
        for _ in range(2):
            caller.call(GENERATE, None)
        await until(lambda: num_waiting(s) == 2)
        counted = "2 requests are on their way to the queue; the limit is 2"
        for _ in range(3):
            await fails(s.generate(), Code.RESOURCE_EXHAUSTED, counted, retry=7.5)
        assert reached == []
        # Other calls take no place of the queue.
        await s.model_info()
        # The core does not know of those that have not reached it.
        await queue_has(s, 4)
        for _ in range(2):
            await s.start_stream()
        await fails(s.generate(), Code.RESOURCE_EXHAUSTED, counted.replace("2", "4"))
    # The core is asked again once it has said something else.
    await queue_is(s, FULL)
    await queue_is(s, "")
    await s.start_stream()


@pytest.mark.parametrize("is_admitted", [True, False])
@served((readiness, "BELIEVED_SECONDS", 0.0))
async def test_a_request_that_the_core_has_not_answered_counts_when_places_are_told(
    s: Service, is_admitted: bool
) -> None:
    """For as long as it takes."""
    calls = [s.generate(), s.generate()]
    submits = [await s.core.expect("submit") for _ in calls]
    await queue_has(s, 3)
    calls.append(s.generate())
    submits.append(await s.core.expect("submit"))
    await fails(s.generate(), Code.RESOURCE_EXHAUSTED, "3 requests are on their way to the queue; the limit is 3")
    for submit in submits:
        if is_admitted:
            await s.core.send(admitted=frontend_pb2.Admitted(stream=submit.stream))
        else:
            await s.core.reject(submit.stream, "QUEUE_FULL")
    await queue_has(s, 1)
    await s.start_stream()


@served((readiness, "BELIEVED_SECONDS", 0.0))
async def test_the_number_of_places_is_believed_for_a_moment_only(s: Service) -> None:
    await queue_has(s, 1)
    for _ in range(3):
        await s.start_stream()


async def test_a_rejected_request_builds_no_stop_string_automaton(s: Service, reached: list[str]) -> None:
    call = s.generate(stop=pb.StopParams(stop_strings=["x" * 256] * 16))
    await s.core.refuse("QUEUE_FULL")
    await fails(call, Code.RESOURCE_EXHAUSTED)
    assert "make_outputs" not in reached


async def test_a_queue_that_fills_while_a_text_is_tokenized_refuses_before_the_hash(
    s: Service, monkeypatch: pytest.MonkeyPatch, reached: list[str]
) -> None:
    encode = tokenizer.Tokenizer.encode

    async def slow_encode(self: tokenizer.Tokenizer, prompt: str, tenant: str, **how: bool) -> list[int]:
        await queue_is(s, FULL)
        return await encode(self, prompt, tenant, **how)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode", slow_encode)
    await fails(s.generate(), Code.RESOURCE_EXHAUSTED, FULL)
    assert "hash_pages" not in reached
    assert s.front_end._streams.num_open == 0


@served(stream_limits=StreamLimits(max_streams=1))
async def test_too_many_open_streams_refuse_before_any_work_on_the_request(s: Service, reached: list[str]) -> None:
    await s.start_stream()
    reached.clear()
    await fails(s.generate(), Code.RESOURCE_EXHAUSTED)
    assert reached == []


@pytest.mark.parametrize("method", [GENERATE, GET_MODEL_INFO, CHECK])
@served(call_limits=CallLimits(message_seconds=1000.0, max_reading_reserved=64))
async def test_calls_without_their_message_time_out(s: Service, method: str) -> None:
    with raw_caller(s) as caller:
        for _ in range(20):
            caller.call(method, None)
        call = cast(Any, s.channel.stream_stream(method))(waits(asyncio.Event()))
        await until(lambda: num_waiting(s) == 21)
        for reading in s.front_end._calls.rooms.values():
            reading._seconds = 0.0
        # The calls end with a status, not with a reset.
        assert {frame.kind for frame in await asyncio.to_thread(caller.wait_ends, 20)} == {HEADERS}
        assert (await call.code(), await call.details()) == (Code.DEADLINE_EXCEEDED, "the call sent no message for 0 s")
        await until(lambda: num_waiting(s) == 0)
        assert s.front_end._streams.num_open == 0


@served(call_limits=CallLimits(max_without_message=3, max_reading=1))
async def test_calls_without_their_message_above_the_limit_are_refused(s: Service) -> None:
    with raw_caller(s) as caller:
        for _ in range(3):
            caller.call(GENERATE, None)
        await until(lambda: num_waiting(s, Room.BULK) == 3)
        call = s.inference.Tokenize(pb.TokenizeRequest(text="the"))
        full = "3 calls have not sent their request yet; the limit is 3"
        await fails(call, Code.RESOURCE_EXHAUSTED, full, retry=0.5)
        # Monitors and operators are served.
        await s.check()
        await s.model_info()


@pytest.mark.parametrize("method", [GENERATE, GET_MODEL_INFO, CHECK])
@served(
    (parsing, "YIELD_SECONDS", 1000.0),
    (parsing, "RESERVED_SECONDS", 1000.0),
    call_limits=CallLimits(message_seconds=1000.0, **PLACES),
)
async def test_calls_that_never_send_their_message_take_no_other_connections_check(s: Service, method: str) -> None:
    """All places and slots that one connection can have; the calls of another are answered before any of them ends."""
    room = {GENERATE: Room.BULK, GET_MODEL_INFO: Room.CONTROL, CHECK: Room.HEALTH}[method]
    with raw_caller(s) as caller:
        for _ in range(40):
            caller.call(method, None)
        most = 8 if room is Room.BULK else 4
        await until(lambda: num_waiting(s, room) == most)
        for _ in range(3):
            await s.check()
            await s.model_info()
        assert num_waiting(s, room) == most


def reset_until_closed(s: Service, num_connections: int) -> None:
    callers = [RawConnection(s.address, source="127.0.0.2") for _ in range(num_connections)]
    while callers:
        for caller in list(callers):
            try:
                caller.reset_calls(GENERATE, 64)
                caller.skip()
            except OSError:
                caller.close()
                callers.remove(caller)


def is_barred(s: Service, source: str) -> bool:
    try:
        RawConnection(s.address, source=source, timeout=0.5).close()
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("num_connections", [1, 2])
@served((sockets, "BAR_SECONDS", 1000.0), call_limits=CallLimits(message_seconds=1000.0))
async def test_connections_that_reset_many_calls_are_closed_and_barred(s: Service, num_connections: int) -> None:
    """As fast as they can. Ordinary callers on the host stay connected; another host notices nothing."""
    before = len(asyncio.all_tasks())
    await s.check()
    with raw_caller(s, "127.0.0.2") as polite:
        polite.call(GENERATE, None)
        await until(lambda: num_waiting(s) == 1)
        await asyncio.to_thread(reset_until_closed, s, num_connections)
        assert is_barred(s, "127.0.0.2") and not is_barred(s, "127.0.0.3")
        # The call that is left is the polite one.
        await until(lambda: num_waiting(s) == 1)
        polite.skip()
    await until(lambda: len(asyncio.all_tasks()) <= before and not num_waiting(s))
    await s.check()
    await until(lambda: not s.front_end._calls._finished and not s.front_end._calls._resets._open)


@pytest.mark.parametrize(("num_resets", "num_others", "is_closed"), [(250, 0, True), (150, 0, False), (250, 50, False)])
@served((server, "SWEEP_SECONDS", 1000.0), call_limits=CallLimits(message_seconds=1000.0))
async def test_slow_resets_close_a_connection_by_their_number_and_share(
    s: Service, monkeypatch: pytest.MonkeyPatch, num_resets: int, num_others: int, is_closed: bool
) -> None:
    """One call after the other, all in one second of the front end's clock, so none waits in gRPC."""
    monkeypatch.setattr(s.front_end._calls._resets, "_clock", lambda: 1.0)
    with raw_caller(s, "127.0.0.2") as caller:
        for _ in range(num_others):
            caller.call(GENERATE, None)
        await until(lambda: num_waiting(s) == num_others)
        resets = s.front_end._calls._resets
        for idx in range(num_resets):
            caller.reset(caller.call(GENERATE, None))
            await until(lambda idx=idx: sum(resets._calls.values()) == num_others + idx + 1)
            await until(lambda: num_waiting(s) == num_others or bool(resets._num_closed))
            if resets._num_closed:
                break
        assert bool(resets._num_closed) == is_closed


def test_the_log_filter_drops_only_tracebacks_of_lost_callers():
    def record(error: BaseException) -> logging.LogRecord:
        return logging.LogRecord("grpc", logging.ERROR, "", 0, "raised", (), (type(error), error, None))

    assert not is_not_of_a_lost_caller(record(grpc.aio.InternalError("the call is gone")))
    assert is_not_of_a_lost_caller(record(ValueError("a fault")))
    assert is_not_of_a_lost_caller(logging.LogRecord("grpc", logging.ERROR, "", 0, "a line", (), None))


async def test_a_message_that_arrives_in_time_is_answered(s: Service) -> None:
    stub: Any = s.channel.stream_unary(GET_MODEL_INFO, response_deserializer=bytes)
    call = stub(waits(may_send := asyncio.Event()))
    await until(lambda: num_waiting(s) == 1)
    may_send.set()
    assert control_pb2.GetModelInfoResponse.FromString(await call).model == "toy"


async def test_a_call_that_ends_without_a_message_is_an_invalid_argument(s: Service) -> None:
    call = cast(Any, s.channel.stream_unary(GET_MODEL_INFO))(iter(()))
    assert "before it sent its request" in await fails(call, Code.INVALID_ARGUMENT)


async def test_finished_calls_with_unread_answers_are_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with service(tmp_path, call_limits=CallLimits(answer_seconds=1000.0)) as s:
        # grpc.aio keeps references to its first and its newest call.
        await s.model_info()
        with raw_caller(s) as caller:
            for _ in range(50):
                caller.call(GET_MODEL_INFO, b"")
            calls = s.front_end._calls
            await until(lambda: len(calls._finished) == 50)
            calls._limits = replace(calls._limits, answer_seconds=0.0)
            await until(lambda: not calls._finished)
            # Else a sweep may release this call as well, whose end would wait for the next one.
            calls._limits = replace(calls._limits, answer_seconds=1000.0)
            assert (await s.model_info()).model == "toy"
            # The answer does not fit the caller's window, but the stream ends.
            assert len(await asyncio.to_thread(caller.wait_ends, 50)) == 50
    assert "50 calls were cancelled: no client has read the answer" in caplog.text


@served(
    (parsing, "UNREAD_SECONDS", 0.05),
    stream_limits=StreamLimits(max_streams=3),
    call_limits=CallLimits(max_unread=4),
)
async def test_finished_calls_with_unread_answers_count_as_open_streams(s: Service) -> None:
    with raw_caller(s) as caller:
        for _ in range(3):
            caller.call(GET_MODEL_INFO, b"")
        await until(lambda: s.front_end._calls.unread.num_taken == 3)
        why = await fails(s.generate(), Code.RESOURCE_EXHAUSTED)
        assert "3 finished calls have answers that their clients have not read" in why
        # The limit of unread answers applies to every method.
        caller.call(GET_MODEL_INFO, b"")
        await until(lambda: s.front_end._calls.unread.num_taken == 4)
        assert "4 finished calls" in await fails(s.model_info(), Code.RESOURCE_EXHAUSTED)
        # Health has a reserve, so that callers that do not read cannot cause a restart of the service.
        await s.check()
    # The calls end with their connection.
    await until(lambda: s.front_end._calls.unread.num_taken == 0)
    await s.start_stream()


async def test_every_one_of_1400_simultaneous_calls_is_answered(s: Service) -> None:
    await queue_is(s, FULL)
    calls = [s.generate(timeout=60) for _ in range(700)]
    infos = [s.control.GetModelInfo(control_pb2.GetModelInfoRequest(), timeout=60) for _ in range(700)]
    assert {await call.code() for call in calls} == {Code.RESOURCE_EXHAUSTED}
    assert {(await call).model for call in infos} == {"toy"}


SMALL = [
    ("/tandem.v1.ControlService/GetLoad", "GetLoadRequest"),
    (GET_MODEL_INFO, "GetModelInfoRequest"),
    ("/tandem.v1.ControlService/FlushCache", "FlushCacheRequest"),
    (CHECK, "HealthCheckRequest"),
    ("/grpc.health.v1.Health/List", "HealthListRequest"),
    ("/grpc.health.v1.Health/Watch", "HealthCheckRequest"),
]


async def test_control_messages_above_64_kib_are_refused_before_parsing(s: Service, reached: list[str]) -> None:
    for method, name in SMALL:
        call = s.channel.unary_stream(method)(bytes(MAX_SMALL_BYTES + 1))
        await fails(call, Code.INVALID_ARGUMENT, f"{name} has 65,537 bytes; the limit is 65,536")
    assert reached == []
    # Field 1000, as long as possible, is refused by its number.
    unknown = b"\xc2\x3e\xfa\xff\x03" + bytes(MAX_SMALL_BYTES - 6)
    assert "has field number 1000" in await fails(s.channel.unary_unary(CHECK)(unknown), Code.INVALID_ARGUMENT)
    assert reached == []


@pytest.mark.parametrize(
    ("method", "most"),
    # 512 tokens have at most 5 characters of at most 4 bytes; 512 ids have at most 5 bytes.
    [("Tokenize", 65_536 + 4 * 5 * 512), ("Detokenize", 65_536 + 5 * 512)],
)
async def test_texts_longer_than_the_model_are_refused_before_parsing(
    s: Service, reached: list[str], method: str, most: int
) -> None:
    call = s.channel.unary_unary(f"/tandem.v1.InferenceService/{method}")
    why = f"{method}Request has {most + 1:,} bytes; the limit is {most:,}"
    await fails(call(bytes(most + 1)), Code.INVALID_ARGUMENT, why)
    assert reached == []


async def test_compressed_messages_are_refused(s: Service) -> None:
    call = s.inference.Tokenize(pb.TokenizeRequest(text="a" * 2000), compression=grpc.Compression.Gzip)
    assert "compression" in (await fails(call, Code.UNIMPLEMENTED)).lower()


@served((core_link, "MAX_FRAME_TO_CORE_BYTES", 3000), state=model_state(page_size=1))
async def test_a_frame_above_the_cores_limit_is_never_sent(s: Service) -> None:
    # 200 ids in pages of 1 token take 4 bytes and a hash of 32 bytes each.
    refused = s.generate(token_ids=pb.TokenIds(ids=[1] * 200))
    assert "bytes; the limit is 3,000" in await fails(refused, Code.INVALID_ARGUMENT)
    assert s.front_end._streams.num_open == 0
    call, submit = await s.start_stream(token_ids=pb.TokenIds(ids=[1] * 20))
    await s.ends(call, submit.stream)
