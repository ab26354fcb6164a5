"""Two tenants: one takes all places that it can get, and the calls of the other one are served as before."""

import asyncio
from typing import Any

import pytest
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend import methods
from scheduler_svc.frontend.rpc.calls import CallLimits, Room
from scheduler_svc.frontend.rpc.gate import Gate
from scheduler_svc.frontend.streaming import stream_table
from scheduler_svc.frontend.streaming.stream import StreamLimits
from tests.scheduler_svc.frontend.failures import Code, fails, failure
from tests.scheduler_svc.frontend.fake_core import Service, served, stalled_calls, until
from tests.scheduler_svc.frontend.test_door import bearer, tenant

GENERATE = "/tandem.v1.InferenceService/Generate"
GREEDY, POLITE = "greedy", "polite"
BOTH = frontend_pb2.Tenants(tenants=map(tenant, (GREEDY, POLITE)))


def generate(s: Service, name: str) -> Any:
    return s.generate(metadata=bearer(name))


async def stream(s: Service, name: str) -> Any:
    """Returns a call that the core has admitted."""
    call = generate(s, name)
    assert (await s.core.admit()).tenant == name
    return call


@served(needs_tokens=True, call_limits=CallLimits(max_reading=4), tenants=BOTH)
async def test_stalled_calls_of_one_tenant_leave_slots_to_the_other(s: Service) -> None:
    stalled = stalled_calls(s, 20, GENERATE, None, GREEDY)
    await until(lambda: s.front_end._calls.rooms[Room.BULK].without_message.num_taken == 20)
    # No slow message has to yield for it: that would take 2 s.
    async with asyncio.timeout(1.5):
        await stream(s, POLITE)
    assert s.front_end._calls.rooms[Room.BULK].without_message.of(GREEDY) == 20
    stalled.close()


@served(needs_tokens=True, call_limits=CallLimits(max_without_message=8), tenants=BOTH)
async def test_calls_without_a_message_of_one_tenant_leave_places_to_the_other(s: Service) -> None:
    stalled = stalled_calls(s, 20, GENERATE, None, GREEDY)
    assert len(await asyncio.to_thread(stalled.wait_ends, 16)) == 16
    full = "4 calls have not sent their request yet; the limit is 4"
    await fails(generate(s, GREEDY), Code.RESOURCE_EXHAUSTED, full, retry=0.5)
    await stream(s, POLITE)
    stalled.close()


class HeldGate(Gate):
    """Lets requests be parsed when the test says so."""

    newest: Gate

    def __init__(self, *bounds: Any, **more: Any) -> None:
        super().__init__(*bounds, **more)
        HeldGate.newest = self


@served((methods, "PARSE_TURNS", 0), (methods, "Gate", HeldGate), needs_tokens=True, tenants=BOTH)
async def test_a_burst_of_requests_of_one_tenant_waits_beside_the_other(s: Service) -> None:
    burst = [generate(s, GREEDY) for _ in range(20)]
    parsed = HeldGate.newest
    await until(lambda: parsed.num_waiting == 19)
    burst.append(generate(s, POLITE))
    await until(lambda: parsed.num_waiting == 20)
    order = [(await s.core.admit()).tenant]
    for _ in range(3):
        parsed.leave(order[-1])
        order.append((await s.core.admit()).tenant)
    assert order == [GREEDY, GREEDY, POLITE, GREEDY]


@pytest.mark.parametrize("full", ["", "the queue is full"])
@served((methods, "PARSE_TURNS", 0), (methods, "FEW_WAITING", 1), (methods, "Gate", HeldGate))
async def test_requests_stay_with_grpc_while_others_wait_to_be_parsed(s: Service, full: str) -> None:
    """A full queue refuses them all the same."""
    calls = [s.generate() for _ in range(2)]
    parsed = HeldGate.newest
    await until(lambda: parsed.num_waiting == 1)
    late = s.generate()
    await s.model_info()
    assert parsed.num_waiting == 1
    if full:
        await s.core.send(core_status=frontend_pb2.CoreStatus(queue_full=full, workers=1))
        await fails(late, Code.RESOURCE_EXHAUSTED, full)
    else:
        await s.core.admit()
        parsed.leave("")
        await s.core.admit()
        parsed.leave("")
        await s.core.admit()
    for call in calls:
        call.cancel()


@served(needs_tokens=True, stream_limits=StreamLimits(max_streams=8), tenants=BOTH)
async def test_streams_of_one_tenant_leave_places_to_the_other(s: Service) -> None:
    calls = [await stream(s, GREEDY) for _ in range(4)]
    full = "4 samples of requests are open; the limit is 4"
    await fails(generate(s, GREEDY), Code.RESOURCE_EXHAUSTED, full, retry=0.5)
    others = [await stream(s, POLITE) for _ in range(2)]
    full = "2 samples of requests are open; the limit is 2"
    await fails(generate(s, POLITE), Code.RESOURCE_EXHAUSTED, full, retry=0.5)
    calls.pop().cancel()
    await s.core.expect("cancel")
    # Half of the five that are not the other's.
    others.append(await stream(s, POLITE))
    await fails(generate(s, GREEDY), Code.RESOURCE_EXHAUSTED, full.replace("2", "3"), retry=0.5)


@served((stream_table, "BELIEVED_SECONDS", 60.0), needs_tokens=True, tenants=BOTH)
async def test_a_tenant_that_is_full_is_refused_without_asking_the_core_again(s: Service) -> None:
    running = await stream(s, GREEDY)
    call = generate(s, GREEDY)
    await s.core.refuse("QUEUE_FULL", retry_seconds=7.5, tenant_is_full=True)
    for refused in (call, generate(s, GREEDY), generate(s, GREEDY)):
        await fails(refused, Code.RESOURCE_EXHAUSTED, retry=7.5)
    assert await s.core.is_silent()
    await stream(s, POLITE)
    # A request of the tenant ends, so a place may be free.
    await s.leave(running)
    await stream(s, GREEDY)


@pytest.mark.parametrize("is_full", [True, False])
@served(needs_tokens=True, tenants=BOTH)
async def test_the_core_is_believed_for_a_moment_only_and_of_the_tenant_alone(
    s: Service, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A request that is too large for what is free does not close the queue."""
    monkeypatch.setattr(stream_table, "BELIEVED_SECONDS", 0.0 if is_full else 60.0)
    call = generate(s, GREEDY)
    await s.core.refuse("QUEUE_FULL", retry_seconds=7.5, tenant_is_full=is_full)
    await failure(call)
    await stream(s, GREEDY)
