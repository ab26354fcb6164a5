"""What a request needs on a lane, shown with a second kind that the core has no line for: adapters (`rigs/resources`).

They block starting and not sampling, and have bytes, a limit, a time for the answer and a refusal of their own.
`test_constraints.py` has what both kinds share.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.reports import WaitReason
from scheduler_svc.core.messages.resources import CONSTRAINT, KINDS, Resource
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording.event_log import EffectsDigest
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.rigs.resources import ADAPTER, ADAPTERS, adapters, resources_of
from tests.rigs.session_log import over_the_wire
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.world import World
from tests.simulation.lives import Lives

SHAPE = Shape(page_size=4, num_pages=60, max_rows=4, max_length=64, chunk_align=4, token_budget=24)
SOURCE, GRAMMAR = b"an adapter", b"a toy, toy_complete=6"
LONG = list(range(1, 31))


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    with adapters():
        yield


def orders(world: World, kind: type[fx.PrepareResource | fx.DropResource]) -> list[tuple[str, bytes]]:
    """Kind and hash of each of these orders."""
    return [(one.kind, one.hash) for one in world.effects if isinstance(one, kind)]


def name_of(kind: str, source: bytes) -> tuple[str, bytes]:
    return kind, sha256(source).digest()


def refusal(world: World, stream: int) -> tuple[fx.RejectCode, str, str] | None:
    rejected = world.streams[stream].rejected
    return None if rejected is None else (rejected.code, rejected.field, rejected.message)


def why(world: World) -> list[str | None]:
    """Why each live request waits, as the list of requests says."""
    found = [world.core.waits.why(request, world.now) for request in world.core.queue]
    return [None if one is None else one[1] for one in found]


# A kind that blocks starting ------------------------------------------------------------------------------------------


def test_an_adapter_keeps_its_request_from_starting_and_no_other(world: World) -> None:
    world.holds_answers = True
    stream, other = world.submit(LONG, adapter=SOURCE), world.submit([3, 4])
    world.run()
    assert orders(world, fx.PrepareResource) == [name_of(ADAPTER, SOURCE)]
    assert world.end_of(other) is not None and len(world.sent[0].starts) == 1
    assert why(world) == ["its adapter is being loaded"]
    [request] = world.core.queue
    assert request.row == 0 and request.admitted_at is None
    world.answer()
    world.run()
    [start] = [start for plan in world.sent for start in plan.starts if start.other_needs]
    assert start.other_needs == (name_of(ADAPTER, SOURCE),) and start.constraint == b""
    assert world.end(stream).reason is not None
    assert orders(world, fx.DropResource) == [name_of(ADAPTER, SOURCE)]
    world.check_all_ended()


def test_a_row_with_two_needs_waits_for_both() -> None:
    """The adapter before it starts, the constraint before it samples, whichever is ready first."""
    for first in (0, 1):
        world = World(SHAPE)
        world.holds_answers = True
        stream = world.submit(LONG, constraint=GRAMMAR, adapter=SOURCE)
        world.run()
        assert [kind for kind, _ in orders(world, fx.PrepareResource)] == [CONSTRAINT, ADAPTER]
        assert world.sent == []
        world.preparing.rotate(first)
        world.answer()
        world.run()
        assert why(world) == ["its constraint is being prepared" if first else "its adapter is being loaded"]
        # With its adapter the prompt is computed, up to the last aligned position before its end.
        assert [plan.chunk_counts.tolist() for plan in world.sent] == ([[24], [4]] if first else [])
        assert world.streams[stream].tokens == []
        world.answer()
        world.run()
        assert world.end(stream).reason in (fx.EndReason.CONSTRAINT_COMPLETE, fx.EndReason.EOS, fx.EndReason.LENGTH)
        world.check_all_ended()


# Limits and refusals ----------------------------------------------------------------------------------------------


def test_each_kind_has_a_limit_of_its_own(world: World) -> None:
    streams = [world.submit([i], adapter=bytes([65 + i]) * 80, constraint=GRAMMAR) for i in range(2)]
    sources = world.core.sources
    assert (sources.num_bytes(ADAPTER), sources.num_bytes(CONSTRAINT)) == (160, len(GRAMMAR))
    message = "the 2 adapters of live requests have 160 bytes and this one has 80; the limit is 200"
    full = world.submit([9], adapter=b"z" * 80, constraint=b"another")
    assert refusal(world, full) == (fx.RejectCode.QUEUE_FULL, ADAPTER, message)
    assert len(sources) == 3, "what is refused leaves nothing"
    assert refusal(world, world.submit([9], constraint=b"z" * 300)) is None
    own = world.submit([5], adapter=b"y" * 39, tenant="greedy")
    more = world.submit([6], adapter=b"x" * 39, tenant="greedy")
    message = "the caller's own adapters have 39 bytes and this one has 39; the limit is 1 now"
    assert refusal(world, own) is None and refusal(world, more) == (fx.RejectCode.QUEUE_FULL, ADAPTER, message)
    for stream in (*streams, own):
        world.cancel(stream)
    assert sources.num_bytes(ADAPTER) == 0 and sources.num_bytes(CONSTRAINT) == 300


def test_a_resource_of_one_kind_is_none_of_another(world: World) -> None:
    stream = world.submit([1], adapter=GRAMMAR, constraint=GRAMMAR, max_new_tokens=20)
    world.run()
    assert orders(world, fx.PrepareResource) == [name_of(CONSTRAINT, GRAMMAR), name_of(ADAPTER, GRAMMAR)]
    assert world.end(stream).reason is not None
    for kind in (ADAPTER, CONSTRAINT):
        first = world.submit([2], **{kind: b"first"})
        wrong = replace(world.streams[stream].submit, stream=50, request_id=f"other {kind}")
        wrong = replace(wrong, resources=(Resource(kind, sha256(b"first").digest(), b"second"),))
        [rejected] = [one for one in world.core.handle(wrong, world.now) if isinstance(one, fx.Rejected)]
        found = (rejected.code, rejected.field, rejected.message)
        assert found == (fx.RejectCode.INVALID, kind, f"the {kind}'s hash is that of another {kind}")
        assert refusal(world, first) is None


@pytest.mark.parametrize(("kind", "other"), [(ADAPTER, CONSTRAINT), (CONSTRAINT, ADAPTER)])
def test_workers_that_refuse_a_kind_get_none_of_it(kind: str, other: str) -> None:
    fleet, why_not, source = Fleet(), f"this worker takes no {kind}s", {ADAPTER: SOURCE, CONSTRAINT: GRAMMAR}
    fleet.join_as(SHAPE, **{f"{kind}_refusal": why_not})
    refused = fleet.submit([1], **{kind: source[kind]})
    assert refusal(fleet, refused) == (fx.RejectCode.INVALID, kind, why_not)
    assert refusal(fleet, fleet.submit([1], **{other: source[other]})) is None
    fleet.join_as(SHAPE)
    streams = [fleet.submit([1, i], adapter=SOURCE, constraint=GRAMMAR) for i in range(6)]
    fleet.run()
    assert {one.worker for one in fleet.told(fx.PrepareResource) if one.kind == kind} == {"b"}
    assert all(fleet.end(stream).reason is not None for stream in streams)
    fleet.lose("b")
    waits = fleet.submit([2], adapter=SOURCE, constraint=GRAMMAR)
    fleet.run()
    [(reason, message)] = [fleet.core.waits.why(request, fleet.now) or ("", "") for request in fleet.core.queue]
    assert reason is WaitReason.NO_LARGE_WORKER and " and take constraints and adapters hold at most 0" in message
    fleet.tick(fleet.core.config.max_worker_wait_seconds + 1)
    failure = fleet.failure(waits)
    assert " and took constraints and adapters; " in failure.message


# Answers ------------------------------------------------------------------------------------------------------------


def test_an_answer_with_an_error_ends_the_requests_with_this_resource_alone(world: World) -> None:
    of_adapter = [world.submit([1, i], adapter=b"toy_refuse", constraint=GRAMMAR) for i in range(2)]
    # The prompt of the second one is computed while its worker prepares.
    of_constraint = [world.submit(prompt, constraint=b"toy_refuse too") for prompt in ([3], LONG)]
    others = [world.submit([2], adapter=SOURCE), world.submit([4]), world.submit([5], constraint=GRAMMAR)]
    world.run()
    for kind, streams in (("adapter", of_adapter), ("constraint", of_constraint)):
        for stream in streams:
            assert world.fault(stream) == f"the {kind} cannot be used: the toy matcher was told to refuse it"
    assert all(world.end(stream).reason is not None for stream in others)
    assert world.core.counters.resets == 0
    world.check_all_ended()


def test_an_answer_that_never_comes_is_waited_for_as_long_as_the_kind_says(world: World) -> None:
    world.holds_answers = True
    stuck, patient = world.submit([1], adapter=SOURCE), world.submit([2], constraint=GRAMMAR)
    world.run()
    for _ in range(31):
        world.handle(ev.WorkerAlive(worker=world.worker))
        assert world.end_of(stuck) is None
        world.tick(1.0)
    assert world.fault(stuck) == f"the adapter cannot be used: worker {world.worker} has not prepared it within 30 s"
    assert world.end_of(patient) is None and KINDS[CONSTRAINT].answer_seconds > ADAPTERS.answer_seconds
    world.answer()
    assert orders(world, fx.DropResource) == [name_of(ADAPTER, SOURCE)], "nobody needs the late one"


def test_an_answer_for_one_kind_is_none_for_the_other(world: World) -> None:
    world.submit([1], adapter=SOURCE)
    world.tick()
    name = sha256(SOURCE).digest()
    effects = world.core.handle(ev.ResourceReady(worker=world.worker, hash=name), world.now)
    assert effects == [fx.DropResource(worker=world.worker, hash=name, kind=CONSTRAINT)], "nobody needs it"
    assert why(world) == ["its adapter is being loaded"]


# Resets, deaths, replay -------------------------------------------------------------------------------------------


def test_after_a_reset_both_kinds_are_sent_again_before_their_requests_go_on() -> None:
    world = World(SHAPE, faults=Faults(fail_steps=frozenset({4})))
    world.submit([1, 2], max_new_tokens=20, constraint=GRAMMAR, adapter=SOURCE)
    world.run()
    assert world.core.counters.resets == 1
    assert orders(world, fx.PrepareResource) == 2 * [name_of(CONSTRAINT, GRAMMAR), name_of(ADAPTER, SOURCE)]
    world.check_all_ended()


def test_a_new_worker_gets_both_kinds_and_the_output_goes_on(world: World) -> None:
    stream = world.submit([1, 2], max_new_tokens=20, constraint=b"toy_complete=12", adapter=SOURCE)
    world.steps(8)
    begun = len(world.streams[stream].tokens)
    assert begun
    world.restart()
    world.run()
    assert len(orders(world, fx.PrepareResource)) == 4 and len(world.streams[stream].tokens) > begun
    world.check_all_ended()


def test_the_journal_brings_both_kinds_back_after_a_kill(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "journal")
    lives.begin()
    callers = [lives.submit([1, i], max_new_tokens=30, adapter=SOURCE, constraint=GRAMMAR * (i % 2)) for i in range(4)]
    for _ in range(2):
        for _ in range(14):
            for name in lives.workers:
                lives.step(name)
        assert not any(caller.done for caller in callers if not caller.submit.resources[1:])
        lives.kill()
        lives.begin()
        assert lives.core.sources.num_bytes(ADAPTER) == len(SOURCE)
        lives.resume_all()
    lives.run()
    assert all(caller.done for caller in callers)
    lives.check()
    assert len(lives.core.sources) == 0
    assert not any(kept.saved.submit.resources for kept in lives.keeper._by_id.values())
    lives.close()


def test_a_recorded_session_gives_the_same_effects_again() -> None:
    world = World(SHAPE, faults=Faults(fail_steps=frozenset({5})))
    for i in range(4):
        world.submit([1, i], max_new_tokens=12, adapter=SOURCE if i % 2 else b"another", constraint=GRAMMAR)
    world.run()
    replayed, digests = Scheduler(world.core.config), [EffectsDigest(), EffectsDigest()]
    for now, event in world.log:
        is_submit = isinstance(event, ev.Submit | ev.ResourceReady)
        digests[0].add(replayed.handle(over_the_wire(event) if is_submit else event, now))
    digests[1].add(world.effects)
    assert digests[0].value() == digests[1].value()
    assert orders(world, fx.PrepareResource), "the session has orders"


def test_requests_with_other_resources_are_other_requests(world: World) -> None:
    """A quarantine, and what resumes a request, must not take one for the other."""
    submit = world.streams[world.submit([1])].submit
    sources = [(b"", b""), (SOURCE, b""), (b"", SOURCE), (SOURCE, SOURCE), (GRAMMAR, SOURCE), (SOURCE, GRAMMAR)]
    options = [replace(submit, resources=resources_of(*each)).options for each in sources]
    assert len(set(options)) == len(options)
    assert options[1][0] == submit.sampling + sha256(SOURCE).digest(), "a quarantine of earlier versions holds on"
