"""How fast a caller is refused: a burst at once, then each refusal is held; others are not affected."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest

from scheduler_svc.frontend.rpc import gate, status
from scheduler_svc.frontend.rpc.calls import CallLimits, Calls, Method
from scheduler_svc.frontend.rpc.gate import BURST, MAX_HOLD_SECONDS, PER_SECOND, HeldRefusals, address_of
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.virtual_loop import in_virtual_time, settle

Make = Callable[[], Refusal]
# The service's answer to everybody.
NOT_HELD = grpc.StatusCode.UNAVAILABLE
CODES = [code for code in grpc.StatusCode if code not in (NOT_HELD, grpc.StatusCode.OK)]


def call_of(peer: str = "ipv4:10.0.0.1:5000") -> Mock:
    """A call of a peer, as far as a refusal needs it."""
    call = Mock(spec_set=["peer", "read", "set_code", "set_details", "set_trailing_metadata"])
    call.peer.return_value, call.read = peer, AsyncMock(return_value=b"")
    return call


def full() -> Refusal:
    return status.overloaded("the queue is full", 0.05)


async def refuse(
    held: HeldRefusals, tenant: str | None, count: int, make: Make = full, peer: str = "ipv4:10.0.0.1:5000"
) -> int:
    """Refuses `count` calls at once. Returns how many are held; they are cancelled."""
    now = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(held.hold(tenant, call_of(peer), make(), now)) for _ in range(count)]
    for _ in range(5):
        await settle()
    num_held = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return num_held


@pytest.mark.parametrize("code", CODES)
@in_virtual_time
async def test_beyond_a_burst_the_refusals_of_a_tenant_are_held_whatever_their_code(code: grpc.StatusCode) -> None:
    held = HeldRefusals(is_shared=True)
    assert await refuse(held, "greedy", BURST, lambda: Refusal(code, "no")) == 0
    assert await refuse(held, "greedy", 7, lambda: Refusal(code, "no")) == 7
    # One rate for all codes.
    assert await refuse(held, "greedy", 7) == 7
    assert await refuse(held, "polite", BURST, lambda: Refusal(code, "no")) == 0


def ended() -> Refusal:
    refusal = Refusal(grpc.StatusCode.INTERNAL, "the request failed")
    refusal.ends_answer = True
    return refusal


@pytest.mark.parametrize(
    ("is_shared", "make"), [(False, full), (True, lambda: status.not_ready("no worker")), (True, ended)]
)
@in_virtual_time
async def test_nothing_is_held_of_one_tenant_of_a_service_not_ready_and_of_ends(is_shared: bool, make: Make) -> None:
    assert await refuse(HeldRefusals(is_shared=is_shared), "greedy", 2 * BURST, make) == 0


@pytest.mark.parametrize("hint", [0.25, 3.0, 60.0, None])
@in_virtual_time
async def test_a_refusal_is_held_for_a_part_of_the_time_of_its_hint(hint: float | None) -> None:
    held, loop = HeldRefusals(is_shared=True), asyncio.get_running_loop()
    most = MAX_HOLD_SECONDS if hint is None else min(MAX_HOLD_SECONDS, hint)
    await refuse(held, "greedy", BURST)
    begun = loop.time()
    refusal = Refusal(grpc.StatusCode.NOT_FOUND, "no", retry_after_seconds=hint)
    await held.hold("greedy", call_of(), refusal, begun)
    assert most / 2 <= loop.time() - begun <= most
    # The age of the call counts: a call that has taken long is not a repetition.
    await refuse(held, "greedy", BURST)
    begun = loop.time()
    await held.hold("greedy", call_of(), refusal, begun - most)
    assert loop.time() == begun


@in_virtual_time
async def test_after_a_pause_the_burst_is_whole_again() -> None:
    held = HeldRefusals(is_shared=True)
    await refuse(held, "greedy", 2 * BURST)
    await asyncio.sleep(5.5 / PER_SECOND)
    assert await refuse(held, "greedy", 8) == 3
    await asyncio.sleep(BURST / PER_SECOND)
    assert await refuse(held, "greedy", BURST) == 0
    # A tenant that was not refused lately takes no memory.
    await asyncio.sleep(BURST / PER_SECOND)
    assert await refuse(held, "another", 1) == 0
    assert list(held._whole_at) == ["another"]


@in_virtual_time
async def test_held_calls_are_bounded_and_tenants_share_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_HELD", 8)

    held = HeldRefusals(is_shared=True)
    await refuse(held, "greedy", BURST)
    # Half of the places; the others are refused at once. Callers that leave give theirs back.
    for _ in range(3):
        assert await refuse(held, "greedy", 20) == 4


@in_virtual_time
async def test_callers_without_a_tenant_count_by_address_and_share_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_HELD", 8)

    held = HeldRefusals(is_shared=True)
    assert await refuse(held, None, BURST) == 0
    assert await refuse(held, None, 1, peer="ipv4:10.0.0.1:6000") == 1
    assert await refuse(held, None, BURST, peer="ipv4:10.0.0.2:5000") == 0
    hosts = ["ipv4:10.0.0.1:1", "ipv4:10.0.0.2:1"]
    now = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(held.hold(None, call_of(host), full(), now)) for host in hosts for _ in range(4)]
    await settle()
    assert sum(not task.done() for task in tasks) == 4
    assert await refuse(held, "polite", BURST) == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("ipv4:10.0.0.1:1", "ipv4:10.0.0.1:2", True),
        ("ipv4:10.0.0.1:1", "ipv4:10.0.0.2:1", False),
        ("ipv6:%5B2001:db8::1%5D:1", "ipv6:[2001:db8::ffff:2]:9", True),
        ("ipv6:%5B2001:db8::1%5D:1", "ipv6:%5B2001:db8:0:1::1%5D:1", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "ipv6:%5Bfe80::2%25eth0%5D:1", True),
        ("unix:", "unix:/a", True),
        ("unknown", "", True),
    ],
)
def test_a_host_has_one_name(one: str, other: str, is_same: bool) -> None:
    assert (address_of(one) == address_of(other)) == is_same
    # It is not the name of a tenant.
    assert address_of(one).startswith("\n")


@in_virtual_time
async def test_callers_beyond_the_known_ones_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_KEYS", 3)

    held = HeldRefusals(is_shared=True)
    refused = [await refuse(held, None, 1, peer=f"ipv4:10.0.{host}.1:1") for host in range(BURST + 5)]
    assert len(held._whole_at) == 4
    assert sum(refused) == 2


@in_virtual_time
async def test_a_held_call_keeps_nothing_of_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    class Message(bytearray):
        pass

    messages: list[weakref.ref[Message]] = []

    async def answer(request: Any, context: Any) -> None:
        message = Message(1000)
        messages.append(weakref.ref(message))
        try:
            raise ValueError(message)
        except ValueError:
            raise status.invalid("priority", "it is too high") from None

    calls = Calls(CallLimits(), is_shared=True)
    method = Method(
        request=type("Request", (), {"DESCRIPTOR": None, "ParseFromString": None}),
        enter=lambda context: "greedy",
        admit=lambda: 1000,
        scan=lambda data: None,
        answer=answer,
        serialize=bytes,
    )
    monkeypatch.setattr("scheduler_svc.frontend.rpc.calls.parse", lambda kind, data: Message(data))
    handler, contexts = calls.handler(method).stream_stream, [call_of() for _ in range(BURST + 5)]
    tasks = [asyncio.create_task(handler(None, context)) for context in contexts]
    while len(messages) < len(tasks):
        await asyncio.sleep(0)
    await settle()
    gc.collect()
    assert [context.set_code.called for context in contexts].count(False) == 5
    assert [message() for message in messages] == [None] * len(messages)
    await asyncio.gather(*tasks)
    assert {context.set_code.call_args.args for context in contexts} == {(grpc.StatusCode.INVALID_ARGUMENT,)}
