"""The gate against a naive model: the calls inside and waiting after each event; no place and no wake-up is lost."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.frontend import methods
from scheduler_svc.frontend.rpc import gate, status
from scheduler_svc.frontend.rpc.gate import Bound, Gate, Places
from scheduler_svc.frontend.rpc.status import Refusal
from tests.scheduler_svc.frontend.failures import Code, refused
from tests.scheduler_svc.frontend.virtual_loop import VirtualLoop, in_virtual_time, settle

KEYS = "abcd"
INSIDE = st.builds(Bound, most=st.sampled_from([1, 2, 6]), per_key=st.sampled_from([2, 9]), is_shared=st.booleans())
WAITING = st.builds(
    Bound,
    most=st.sampled_from([9, 30]),
    per_key=st.sampled_from([6, 30]),
    is_shared=st.booleans(),
    thing=st.just("call"),
    state=st.just("wait here"),
)


def closed() -> Refusal:
    return status.not_ready("closed")


@dataclass
class Model:
    """Lists, and the rules of a gate as its documentation says them."""

    inside_bound: Bound
    waiting_bound: Bound
    newest_first: bool
    inside: list[tuple[str, int]] = field(default_factory=list)
    # Key and number of a call, and what it counts for.
    waiting: list[tuple[str, int, int]] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KEYS, 0.0))
    least: float = 0.0
    # When a key got in, or began to wait.
    turn: dict[str, int] = field(default_factory=dict)
    now: int = 0

    def arrive(self, key: str, number: int, num: int) -> bool:
        """Returns whether the call may wait or get in."""
        if not any(key == each for each, *_ in self.waiting):
            self.now += 1
            self.turn[key] = self.now
            self.used[key] = max(self.used[key], self.least)
        counts = [(each, size) for each, _, size in self.waiting]
        if not self._has_room(key) and not fits(self.waiting_bound, counts, key, num):
            return False
        self.waiting.append((key, number, num))
        self.let_in()
        return True

    def leave(self, key: str, number: int, used: float) -> None:
        self.inside.remove((key, number))
        self.used[key] += used
        self.let_in()

    def let_in(self) -> None:
        while ready := {key for key, *_ in self.waiting if self._has_room(key)}:
            key = min(ready, key=lambda key: (self.used[key], self.turn[key]))
            of_key = [call for call in self.waiting if call[0] == key]
            call = of_key[-1 if self.newest_first else 0]
            self.waiting.remove(call)
            self.inside.append(call[:2])
            self.now += 1
            self.turn[key] = self.now
            self.least = max(self.least, self.used[key])

    def _has_room(self, key: str) -> bool:
        return fits(self.inside_bound, [(each, 1) for each, _ in self.inside], key, 1)


def fits(bound: Bound, taken: list[tuple[str, int]], key: str, num: int) -> bool:
    own = sum(size for each, size in taken if each == key)
    left = bound.most - sum(size for _, size in taken) - num
    return own + num <= bound.per_key and left >= (own + num - 1 if bound.is_shared else 0)


class Machine(RuleBasedStateMachine):
    """Tasks that enter a gate, leave it, give up while they wait, or in the turn in which they get in."""

    @initialize(inside=INSIDE, waiting=WAITING, newest_first=st.booleans())
    def make(self, inside: Bound, waiting: Bound, newest_first: bool) -> None:
        self.loop = VirtualLoop()
        self.gate = Gate(inside, waiting, newest_first=newest_first)
        self.model = Model(inside, waiting, newest_first)
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.number = 0

    @rule(calls=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(1, 3)), min_size=1, max_size=6))
    def enter(self, calls: list[tuple[str, int]]) -> None:
        for key, num in calls:
            self.number += 1
            call = key, self.number
            self.tasks[call] = self.loop.create_task(self.gate.enter(key, num))
            self.settle()
            if not self.model.arrive(key, self.number, num):
                assert isinstance(self.tasks.pop(call).exception(), Refusal)

    @precondition(lambda self: self.model.inside)
    @rule(data=st.data(), used=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4))
    def leave_one_after_the_other(self, data: st.DataObject, used: list[float]) -> None:
        for each in used:
            if self.model.inside:
                self.leave(data, each)

    def leave(self, data: st.DataObject, used: float) -> None:
        key, number = data.draw(st.sampled_from(self.model.inside))
        self.gate.leave(key, used)
        del self.tasks[key, number]
        self.model.leave(key, number, used)

    @precondition(lambda self: self.model.inside and self.model.waiting)
    @rule(data=st.data())
    def leave_and_give_up_in_the_same_turn(self, data: st.DataObject) -> None:
        key, number = data.draw(st.sampled_from(self.model.inside))
        self.gate.leave(key)
        del self.tasks[key, number]
        before = list(self.model.inside)
        self.model.leave(key, number, 0.0)
        # The gate lets others in when the cancelled task runs.
        for call in [each for each in self.model.inside if each not in before][:1]:
            self.tasks.pop(call).cancel()
            self.model.leave(*call, 0.0)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.model.waiting))
        self.model.waiting.remove(call)
        self.tasks.pop(call[:2]).cancel()

    @precondition(lambda self: self.model.inside and self.model.waiting)
    @rule(data=st.data())
    def give_up_and_leave_in_the_same_turn(self, data: st.DataObject) -> None:
        self.give_up(data)
        self.leave(data, 0.0)

    @rule(data=st.data(), leaves=st.booleans())
    def close(self, data: st.DataObject, leaves: bool) -> None:
        before = [each[:2] for each in self.model.waiting]
        if leaves and self.model.inside:
            self.leave(data, 0.0)
        # A call that gets in in this turn of the event loop is refused, too.
        self.gate.close(closed())
        self.settle()
        with pytest.raises(Refusal):
            self.loop.run_until_complete(self.gate.enter("a"))
        self.gate.open()
        for call in before:
            assert isinstance(self.tasks.pop(call).exception(), Refusal)
        self.model.inside = [call for call in self.model.inside if call not in before]
        self.model.waiting.clear()

    @invariant()
    def is_like_the_model(self) -> None:
        self.settle()
        waiting = {key: sum(num for each, _, num in self.model.waiting if each == key) for key in KEYS}
        inside = {key: sum(each == key for each, _ in self.model.inside) for key in KEYS}
        assert {key: self.gate.waiting.of(key) for key in KEYS} == waiting
        assert {key: self.gate.inside.of(key) for key in KEYS} == inside
        assert {call for call, task in self.tasks.items() if task.done()} == set(self.model.inside)
        assert {call for call, task in self.tasks.items() if not task.done()} == {c[:2] for c in self.model.waiting}

    @invariant()
    def keeps_its_bounds(self) -> None:
        for places, bound in (
            (self.gate.inside, self.model.inside_bound),
            (self.gate.waiting, self.model.waiting_bound),
        ):
            assert places.num_taken <= bound.most
            assert all(num <= bound.per_key for _, num in places.items())

    @invariant()
    def nobody_waits_for_a_free_place(self) -> None:
        assert not any(self.gate.inside.has_room(key) for key, _ in self.gate.waiting.items())

    def settle(self) -> None:
        self.loop.run_until_complete(settle())

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in self.tasks.values():
                task.cancel()
            self.settle()
            self.loop.close()


TestGate = Machine.TestCase
TestGate.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("bound", "others", "limits"),
    [
        # Half of what others leave, and the last place for a key that has none.
        (Bound(most=64), (0, 32, 48, 63, 64, 65), [32, 16, 8, 1, 0, 0]),
        (Bound(most=64, is_shared=False), (0, 63, 64, 65), [64, 1, 0, 0]),
        (Bound(most=64, per_key=9), (0, 48, 63, 64), [9, 8, 1, 0]),
        (Bound(per_key=9), (0, 1000), [9, 9]),
    ],
)
def test_a_key_gets_half_of_what_others_leave(bound: Bound, others: tuple[int, ...], limits: list[int]) -> None:
    found = list[int]()
    for num in others:
        places = Places(bound)
        places.add("other", num)
        found.append(places.limit("key"))
    assert found == limits


def test_places_are_counted_together_with_those_beside_them() -> None:
    beside = Places(Bound(thing="answer", state="are unread"))
    beside.replace({"a": 2, "b": 1})
    places = Places(Bound(most=8, thing="sample", state="are open now", retry_seconds=3.0), beside)
    places.take("a")
    # Three of a's and one of b's are taken.
    assert (places.of("a"), places.limit("a"), places.limit("b"), places.limit("c")) == (3, 4, 3, 2)
    why = refused(places.take, "a", 2)
    full = "1 sample is open now and 2 answers are unread and this one adds 2; the limit is 4"
    assert (why.code, why.message, why.retry_after_seconds) == (Code.RESOURCE_EXHAUSTED, full, 3.0)
    with (
        places.taking("a"),
        pytest.raises(Refusal, match="2 samples are open now and 2 answers are unread; the limit is 4"),
    ):
        places.check("a")
    assert places.num_taken == 1


@in_virtual_time
async def test_who_waits_too_long_gives_up_also_in_the_turn_in_which_it_gets_in() -> None:
    one = Gate(Bound(most=1))
    await one.enter("a")
    with pytest.raises(TimeoutError):
        await one.enter("b", seconds=5.0)
    assert asyncio.get_running_loop().time() == 5.0
    asyncio.get_running_loop().call_at(10.0, one.leave, "a")
    with pytest.raises(TimeoutError):
        await one.enter("b", seconds=5.0)
    assert (one.inside.num_taken, one.waiting.num_taken) == (0, 0)


@in_virtual_time
async def test_a_gate_that_is_closed_for_a_key_or_for_a_time_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_KEYS", 2)

    one = Gate()
    for key in "abc":
        one.close(closed(), key, 2.0)
    for key in "ab":
        with pytest.raises(Refusal, match="closed"):
            await one.enter(key)
    # It is one too many to be remembered.
    await one.enter("c")
    one.open("a")
    await one.enter("a")
    await asyncio.sleep(2.0)
    # Keys that are open again leave room.
    one.close(closed(), "c", 2.0)
    one.close(closed(), "d", 2.0)
    await one.enter("b")
    for key in "cd":
        with pytest.raises(Refusal, match="closed"):
            one.check(key)
    one.close(closed())
    with pytest.raises(Refusal, match="closed"):
        one.check("d")


class Requests:
    """Tasks that wait for their turn and note that they passed, each of the tenant at its place in `tenants`."""

    def __init__(self, tenants: Sequence[str], num_turns: int = methods.PARSE_TURNS) -> None:
        self.turns = Gate(Bound(most=1), methods.WAITING, num_turns=num_turns)
        self.passed: list[int] = []
        self.tasks = [asyncio.create_task(self._run(number, tenant)) for number, tenant in enumerate(tenants)]

    async def _run(self, number: int, tenant: str) -> None:
        await self.turns.enter(tenant, 100)
        self.passed.append(number)


@pytest.mark.parametrize("num_turns", [1, 2, methods.PARSE_TURNS])
async def test_a_place_is_free_after_these_turns(num_turns: int) -> None:
    """New requests pass one by one, so that other work of the event loop runs between them."""
    requests, passed_in = Requests("aaaaaabbc", num_turns), list[int]()
    for turn in itertools.count():
        if len(requests.passed) == 9:
            break
        await asyncio.sleep(0)
        passed_in += [turn] * (len(requests.passed) - len(passed_in))
        assert requests.turns.num_waiting >= 9 - len(requests.passed) - 1
    # The first passes at once; then tenants take turns. The turn of a task is the one after that of its future.
    assert requests.passed == [0, 1, 6, 8, 2, 7, 3, 4, 5]
    assert {after - before for before, after in itertools.pairwise(passed_in[1:])} == {num_turns}
    # It lasts one turn when no call waits.
    await asyncio.sleep(0)
    assert requests.turns.ask("a") is None and requests.turns.ask("a") is not None


async def test_a_cancelled_task_gives_up_its_turn() -> None:
    requests = Requests([""] * 4)
    await asyncio.sleep(0)
    requests.tasks[1].cancel()
    requests.tasks[2].cancel()
    await asyncio.gather(*requests.tasks, return_exceptions=True)
    assert requests.passed == [0, 3]
    # The next turn is free again.
    await requests.turns.enter("", 100)


async def test_waiting_bytes_are_bounded_and_leave_room_for_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "WAITING", replace(methods.WAITING, most=1000))

    # One passes at once; five wait, and as much is free as they hold; the next two are refused.
    greedy = Requests("a" * 8)
    await asyncio.sleep(0)
    other = asyncio.create_task(greedy.turns.enter("b", 100))
    results = await asyncio.gather(*greedy.tasks, return_exceptions=True)
    refused = [each.message for each in results if isinstance(each, Refusal)]
    assert len(refused) == 2
    assert "500 bytes of the caller's requests wait to be parsed and this one adds 100; the limit is 500" in refused[0]
    await other
    assert len(greedy.passed) == 6
