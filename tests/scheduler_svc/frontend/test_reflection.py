"""gRPC reflection: its answers, its names, and that its calls have the entrance and bounds of all calls."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2 as pb
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.__main__ import _front_end_settings
from scheduler_svc.frontend.reflection import MAX_BYTES, METHOD, NAMES
from scheduler_svc.frontend.rpc.calls import CallLimits, Room
from scheduler_svc.settings import SchedulerSettings
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.scheduler_svc.frontend.failures import Code, fails
from tests.scheduler_svc.frontend.fake_core import Service, allow, served, service, until
from tests.scheduler_svc.frontend.test_door import bearer, tenants, token_of

PUBLIC = ("grpc.health.v1.Health", "tandem.v1.ControlService", "tandem.v1.InferenceService")


def opened(s: Service, name: str = NAMES[0], metadata: Any = None) -> Any:
    call: Any = s.channel.stream_stream(
        f"/{name}/{METHOD}",
        request_serializer=pb.ServerReflectionRequest.SerializeToString,
        response_deserializer=pb.ServerReflectionResponse.FromString,
    )
    return call(metadata=metadata, timeout=TIMEOUT_SECONDS)


async def asked(call: Any, **request: Any) -> Any:
    await call.write(pb.ServerReflectionRequest(**request))
    return await call.read()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("name", NAMES)
async def test_the_public_services_are_listed_only_if_it_is_on(tmp_path: Path, name: str, is_on: bool) -> None:
    async with service(tmp_path, reflection=is_on) as s:
        if not is_on:
            # Without a stream of requests, because grpc.aio may report a write after the refusal as an internal error.
            await fails(s.channel.unary_unary(f"/{name}/{METHOD}")(b""), Code.UNIMPLEMENTED)
            return
        call = opened(s, name)
        services = (await asked(call, list_services="")).list_services_response.service
        assert [each.name for each in services] == [PUBLIC[0], "grpc.reflection.v1alpha.ServerReflection", *PUBLIC[1:]]
        await call.done_writing()
        assert await call.code() is Code.OK


@served(reflection=True)
async def test_several_names_are_told_in_one_call_and_nothing_internal(s: Service) -> None:
    call = opened(s)
    for symbol in (*PUBLIC, "tandem.v1.GenerateRequest", "google.rpc.BadRequest"):
        answer = await asked(call, file_containing_symbol=symbol)
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(each)
            for each in answer.file_descriptor_response.file_descriptor_proto
        ]
        own = {f"{file.package}.{each.name}" for file in files for each in (*file.service, *file.message_type)}
        assert symbol in own
    hidden = [{"file_containing_symbol": name} for name in ("tandem.internal.v1.Submit", "google.protobuf.Any", "none")]
    for request in (*hidden, {"file_by_filename": "tandem/internal/v1/worker.proto"}):
        assert (await asked(call, **request)).error_response.error_code == Code.NOT_FOUND.value[0]
    assert (await asked(call)).error_response.error_code == Code.INVALID_ARGUMENT.value[0]


@served(reflection=True)
async def test_a_request_above_the_limit_is_refused_as_the_first_and_as_a_further_one(s: Service) -> None:
    for num_before in (0, 1):
        call = opened(s)
        for _ in range(num_before):
            await asked(call, list_services="")
        why = f"ServerReflectionRequest has {MAX_BYTES + 3:,} bytes; the limit is {MAX_BYTES:,}"
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(call, file_containing_symbol="x" * MAX_BYTES)
        assert (await call.code(), await call.details()) == (Code.INVALID_ARGUMENT, why)


@served(reflection=True, call_limits=CallLimits(message_seconds=0.1))
async def test_a_call_whose_next_request_is_late_ends(s: Service) -> None:
    call = opened(s)
    await asked(call, list_services="")
    assert (await call.code(), await call.details()) == (Code.DEADLINE_EXCEEDED, "the call sent no message for 0.1 s")


async def test_calls_that_wait_are_bounded_and_take_nothing_of_other_methods(tmp_path: Path) -> None:
    limits = CallLimits(message_seconds=1000.0, max_without_message_reserved=3, max_reading_reserved=3)
    async with service(tmp_path, reflection=True, call_limits=limits) as s:
        waiting = s.front_end._calls.rooms[Room.REFLECTION].without_message
        calls = [opened(s) for _ in range(2)]
        for call in calls:
            await asked(call, list_services="")
        await until(lambda: waiting.num_taken == 2)
        # A connection gets at most half of what the others leave.
        refused = opened(s)
        full = "2 calls have not sent their request yet; the limit is 2"
        assert (await refused.code(), await refused.details()) == (Code.RESOURCE_EXHAUSTED, full)
        await s.model_info()
        for call in calls:
            call.cancel()
        await until(lambda: waiting.num_taken == 0)


@served(reflection=True, needs_tokens=True, tenants=tenants())
async def test_a_caller_whose_token_is_revoked_learns_nothing_more(s: Service) -> None:
    call = opened(s, metadata=bearer(token_of("inference")))
    assert (await asked(call, list_services="")).HasField("list_services_response")
    await allow(s, frontend_pb2.Tenants())
    # The read that waits was let in before.
    await asked(call, list_services="")
    assert await call.code() is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("listen", "given", "is_on"),
    [
        ("127.0.0.1:0", None, True),
        ("[::1]:50051", None, True),
        ("localhost:50051", None, True),
        ("0.0.0.0:50051", None, False),
        ("[::]:50051", None, False),
        ("service.example:50051", None, False),
        ("nothing", None, False),
        ("0.0.0.0:50051", True, True),
        ("127.0.0.1:0", False, False),
    ],
)
def test_without_a_setting_it_is_on_where_this_machine_alone_calls(
    listen: str, given: bool | None, is_on: bool
) -> None:
    settings = SchedulerSettings(listen=listen, reflection=given)
    folder: Any = SimpleNamespace(frontend_endpoint="", path=Path())
    assert _front_end_settings(settings, folder, None).reflection is is_on
