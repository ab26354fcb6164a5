"""How many messages are read at once, for which callers, and the memory of a front end with stalled callers."""

import asyncio
from dataclasses import dataclass

import grpc
import pytest

from scheduler_svc.frontend import server
from scheduler_svc.frontend.rpc import calls
from scheduler_svc.frontend.rpc.calls import Call, CallLimits, Reading, Room
from scheduler_svc.frontend.rpc.options import WINDOW_BYTES
from scheduler_svc.frontend.rpc.status import Refusal
from tests.rigs.raw_http2 import RawConnection
from tests.scheduler_svc.frontend.fake_core import Service, served, until
from tests.scheduler_svc.frontend.virtual_loop import in_virtual_time, settle

GENERATE = "/tandem.v1.InferenceService/Generate"
MESSAGE_BYTES = 4 << 20


class Readers:
    """Calls that are read, and the names of those that had their turn, in order."""

    def __init__(self, num_places: int, *, is_shared: bool = True) -> None:
        self.reading = Reading(100, num_places, 10.0, is_shared=is_shared)
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[str]] = {}
        self.arrived: dict[str, asyncio.Event] = {}

    async def start(self, *names: str) -> None:
        """The tenant is the first letter of a name."""
        for name in names:
            self.arrived[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._read(name))
        await settle()

    async def arrive(self, *names: str) -> None:
        """The messages of these calls are here."""
        for name in names:
            self.arrived[name].set()
            assert await self.tasks[name] == name
        await settle()

    async def _read(self, name: str) -> str:
        task = asyncio.current_task()
        assert task is not None
        return await self.reading.read(Call(Context(name, self), task, 0.0, key=name[0]))

    def ending(self) -> list[tuple[str, Refusal]]:
        return [(call.context.name, call.aborted) for call in self.reading.sweep() if call.aborted is not None]


@dataclass(frozen=True, eq=False)
class Context:
    """It reads until its message is here."""

    name: str
    readers: Readers

    async def read(self) -> str:
        self.readers.served.append(self.name)
        await self.readers.arrived[self.name].wait()
        return self.name


async def test_turns_go_round_the_tenants_and_to_the_newest_call_of_each() -> None:
    readers = Readers(8)
    await readers.start(*(f"a{number}" for number in range(6)), "b0", "b1", "b2", "c0", "d0", "e0")
    # a has half of 8, b half of 4, c half of 2; the last one goes to d.
    assert readers.served == ["a0", "a1", "a2", "a3", "b0", "b1", "c0", "d0"]
    await readers.arrive("a0", "a1", "a2")
    # e has none; b has two already, as many as it leaves free.
    assert readers.served[8:] == ["e0", "a5"]
    readers.tasks["a4"].cancel()
    await readers.arrive("c0", "d0", "e0", "b0", "b1", "a3", "a5")
    assert readers.served[10:] == ["b2"]
    await readers.start("a6")
    assert readers.served[11:] == ["a6"]


async def test_a_caller_that_leaves_in_the_turn_in_which_it_gets_a_slot_gives_it_back() -> None:
    readers = Readers(1, is_shared=False)
    await readers.start("a0", "a1", "a2")
    readers.reading._gate.leave("a")
    readers.tasks["a2"].cancel()
    await settle()
    assert readers.served == ["a0", "a1"]


@in_virtual_time
async def test_a_call_without_a_slot_is_refused_when_its_time_is_over() -> None:
    readers = Readers(1)
    await readers.start("a0", "a1")
    with pytest.raises(Refusal, match=r"could not be read for 10 s: 1 message is read at once, and 1 of") as info:
        await readers.tasks["a1"]
    assert info.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert info.value.retry_after_seconds
    [(name, refusal)] = readers.ending()
    assert (name, refusal.code) == ("a0", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert readers.ending() == []
    assert readers.reading.without_message.num_taken == 1


async def test_a_slow_message_yields_to_a_call_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "YIELD_SECONDS", 0.0)

    # The process may have been paused, so nothing yields when it is looked at for the first time.
    readers = Readers(4)
    await readers.start("b0", "a0", "a1", "c0")
    assert readers.ending() == []
    await readers.start("d0")
    # b has one slot, as c; the one with the most is a.
    [(context, refusal)] = readers.ending()
    assert (context, refusal.code) == ("a0", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refusal.retry_after_seconds
    await readers.arrive("a0")
    assert readers.served[4:] == ["d0"]
    # All have one now, so a tenant that wants a second one gets it from itself.
    await readers.start("b1")
    assert [context for context, _ in readers.ending()] == ["b0"]


@served(
    (server, "SWEEP_SECONDS", 0.02),
    (calls, "YIELD_SECONDS", 1000.0),
    call_limits=CallLimits(max_reading=4, message_seconds=1000.0),
)
async def test_callers_behind_stalled_calls_are_served(s: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """All slots are taken by calls that stall, and more such calls wait: a call of the same tenant gets a slot."""
    stalled = RawConnection(s.address)
    streams = [stalled.call(GENERATE, None) for _ in range(20)]
    await until(lambda: s.front_end._calls.rooms[Room.BULK].without_message.num_taken == 20)
    monkeypatch.setattr(calls, "YIELD_SECONDS", 0.0)
    await s.start_stream()
    ends = await asyncio.to_thread(stalled.wait_ends, 4)
    assert {frame.stream for frame in ends} < set(streams)
    stalled.close()


@served((calls, "YIELD_SECONDS", 1000.0), call_limits=CallLimits(max_reading=4, message_seconds=1000.0))
async def test_the_service_lets_in_the_messages_of_the_slots_alone(s: Service) -> None:
    """20 calls send 4 MB less a byte each as far as the server lets them; `tests.measure.stalled_messages` measures
    the memory.
    """
    stalled = RawConnection(s.address)
    streams = [stalled.call(GENERATE, None) for _ in range(20)]
    await until(lambda: s.front_end._calls.rooms[Room.BULK].without_message.num_taken == 20)
    sent = await asyncio.to_thread(stalled.stall, streams, MESSAGE_BYTES - 2, quiet_seconds=0.3)
    # Of the others their first windows.
    assert sent <= 4 * MESSAGE_BYTES + 20 * WINDOW_BYTES
    stalled.close()
