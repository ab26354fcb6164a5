"""How many messages are read at once, by whom, and the memory of a front end whose callers stall."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from scheduler_svc.frontend import server
from scheduler_svc.frontend.rpc import gates
from scheduler_svc.frontend.rpc.calls import CallLimits, Room
from scheduler_svc.frontend.rpc.gates import Places, ReadSlots, share
from scheduler_svc.frontend.rpc.options import WINDOW_BYTES
from scheduler_svc.frontend.rpc.status import Refusal
from tests.rigs.raw_http2 import RawConnection
from tests.scheduler_svc.frontend.fake_core import Service, until
from tests.scheduler_svc.frontend.virtual_loop import in_virtual_time

Run = Callable[..., None]
GENERATE = "/tandem.v1.InferenceService/Generate"
MESSAGE_BYTES = 4 << 20


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


class Takers:
    """Tasks that take slots, and the names of those that have one, in order."""

    def __init__(self, slots: ReadSlots) -> None:
        self.slots = slots
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, *names: str) -> None:
        """The tenant is the first letter of a name."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))
        await settle()

    async def give_back(self, *names: str) -> None:
        for name in names:
            self.slots.give_back(name)
        await settle()

    async def _take(self, name: str) -> None:
        await self.slots.take(name, name[0])
        self.served.append(name)


def test_a_tenant_gets_half_of_what_others_leave():
    assert [share(64, others, is_shared=True) for others in (0, 32, 48, 63, 64, 65)] == [32, 16, 8, 1, 0, 0]
    assert [share(64, others, is_shared=False) for others in (0, 63, 64, 65)] == [64, 1, 0, 0]
    places = Places(10, is_shared=True)
    places.add("a", 3)
    places.add("b", 2)
    assert (places.of("a"), places.limit("a"), places.limit("b"), places.limit("c")) == (3, 4, 4, 3)
    places.add("a", -3)
    assert (places.of("a"), places.num_taken, places.limit("b")) == (0, 2, 5)


def test_slots_go_round_the_tenants_and_to_the_newest_call_of_each():
    async def scenario() -> None:
        takers = Takers(ReadSlots(8, 10.0, is_shared=True))
        await takers.start(*(f"a{number}" for number in range(6)), "b0", "b1", "b2", "c0", "d0", "e0")
        # a has half of 8, b half of 4, c half of 2; the last one goes to d.
        assert takers.served == ["a0", "a1", "a2", "a3", "b0", "b1", "c0", "d0"]
        await takers.give_back("a0", "a1", "a2")
        # e has none; b has two already, as many as it leaves free.
        assert takers.served[8:] == ["e0", "a5"]
        takers.tasks["a4"].cancel()
        await takers.give_back("c0", "d0", "e0", "b0", "b1", "a3", "a5")
        assert takers.served[10:] == ["b2"]
        await takers.start("a6")
        assert takers.served[11:] == ["a6"]

    in_loop(scenario)


def test_a_caller_that_leaves_in_the_turn_in_which_it_gets_a_slot_gives_it_back():
    async def scenario() -> None:
        takers = Takers(ReadSlots(1, 10.0, is_shared=False))
        await takers.start("a0", "a1", "a2")
        takers.slots.give_back("a0")
        takers.tasks["a2"].cancel()
        await settle()
        assert takers.served == ["a0", "a1"]

    in_loop(scenario)


def test_a_call_without_a_slot_is_refused_when_its_time_is_over():
    async def scenario() -> None:
        slots = ReadSlots(1, 0.02, is_shared=False)
        await slots.take("first", "")
        with pytest.raises(Refusal, match=r"could not be read for 0.02 s: 1 message is read at once, and 1 of") as info:
            await slots.take("second", "")
        assert info.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert info.value.retry_after_seconds
        [(context, refusal)] = slots.ending()
        assert (context, refusal.code) == ("first", grpc.StatusCode.DEADLINE_EXCEEDED)
        assert slots.ending() == []

    in_virtual_time(scenario())


def test_a_slow_message_yields_to_a_call_that_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gates, "YIELD_SECONDS", 0.0)

    async def scenario() -> None:
        # The process may have been paused, so nothing yields when it is looked at for the first time.
        takers = Takers(ReadSlots(4, 10.0, is_shared=True))
        await takers.start("b0", "a0", "a1", "c0")
        assert takers.slots.ending() == []
        await takers.start("d0")
        # b has one slot, as c; the one with the most is a.
        [(context, refusal)] = takers.slots.ending()
        assert (context, refusal.code) == ("a0", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert refusal.retry_after_seconds
        await takers.give_back("a0")
        assert takers.served[4:] == ["d0"]
        # All have one now, so a tenant that wants a second one gets it from itself.
        await takers.start("b1")
        assert [context for context, _ in takers.slots.ending()] == ["b0"]

    in_loop(scenario)


def test_callers_behind_stalled_calls_are_served(run: Run, monkeypatch: pytest.MonkeyPatch):
    """All slots are taken by calls that stall, and more such calls wait: a call of the same tenant gets a slot."""
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(gates, "YIELD_SECONDS", 1000.0)

    async def scenario(s: Service) -> None:
        stalled = RawConnection(s.address)
        streams = [stalled.call(GENERATE, None) for _ in range(20)]
        await until(lambda: s.front_end._calls.rooms[Room.BULK].without_message.num_taken == 20)
        monkeypatch.setattr(gates, "YIELD_SECONDS", 0.0)
        await s.start_stream()
        ends = await asyncio.to_thread(stalled.wait_ends, 4)
        assert {frame.stream for frame in ends} < set(streams)
        stalled.close()

    run(scenario, call_limits=CallLimits(max_reading=4, message_seconds=1000.0))


def test_the_service_lets_in_the_messages_of_the_slots_alone(run: Run, monkeypatch: pytest.MonkeyPatch):
    """20 calls send 4 MB less a byte each as far as the server lets them; `tests.measure.stalled_messages` measures
    the memory.
    """
    monkeypatch.setattr(gates, "YIELD_SECONDS", 1000.0)

    async def scenario(s: Service) -> None:
        stalled = RawConnection(s.address)
        streams = [stalled.call(GENERATE, None) for _ in range(20)]
        await until(lambda: s.front_end._calls.rooms[Room.BULK].without_message.num_taken == 20)
        sent = await asyncio.to_thread(stalled.stall, streams, MESSAGE_BYTES - 2, quiet_seconds=0.3)
        # Of the others their first windows.
        assert sent <= 4 * MESSAGE_BYTES + 20 * WINDOW_BYTES
        stalled.close()

    run(scenario, call_limits=CallLimits(max_reading=4, message_seconds=1000.0))
