"""The limits of a worker count once it has confirmed a step. Until then it is unproven and gets no requests."""

from dataclasses import replace

from scheduler_svc.core.lanes import DEATHS
from scheduler_svc.core.messages import effects as fx
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.sent_plans import load
from tests.scheduler_svc.core.world import World, greedy

SHAPE = Shape(page_size=4, num_pages=40, max_length=100)
STRICT = greedy(prove_workers=True)


def models(world: World) -> list[int]:
    """Returns the max_length of each ModelServed since the last call."""
    sent = world.told(fx.ModelServed)
    world.effects.clear()
    return [each.info.max_length for each in sent if each.info is not None]


def test_front_ends_get_the_model_after_the_first_confirmed_step() -> None:
    world = World(SHAPE, config=STRICT)
    world.tick()
    assert models(world) == [] and world.core.info is None
    rejected = world.refusal(world.submit([1]))
    assert rejected.code is fx.RejectCode.NOT_READY
    assert world.apply() and world.deliver()
    assert models(world) == [100]
    stream = world.submit([1, 2], max_new_tokens=5)
    world.run()
    assert world.streams[stream].end is not None
    world.streams.pop(1)
    world.check_all_ended()


def test_a_worker_that_need_not_be_proven_gets_a_request_in_its_first_plan() -> None:
    world = World(SHAPE, config=greedy(prove_workers=False))
    assert models(world) == [100]
    assert world.streams[world.submit([1, 2])].rejected is None
    world.tick()
    assert [start.tokens.tolist() for start in world.sent[0].starts] == [[1, 2]]


def test_a_worker_that_only_joins_makes_no_request_wait_for_it() -> None:
    """Its sizes are not the service's, and a request that only it could hold is refused."""
    fleet = Fleet(replace(SHAPE, max_length=4000, num_pages=2000), config=STRICT)
    too_early = fleet.refusal(fleet.submit([1] * 200))
    assert too_early.code is fx.RejectCode.NOT_READY
    proven = fleet.join_as(SHAPE)
    for _ in range(2):
        fleet.tick()
        fleet.serve(proven)
    stream = fleet.submit([1, 2], max_new_tokens=3)
    for _ in range(20):
        fleet.tick(0.001)
        fleet.serve(proven)
    assert fleet.streams[stream].end is not None
    refused = fleet.refusal(fleet.submit([1] * 200))
    assert refused.code is fx.RejectCode.INVALID


def test_the_first_step_computes_one_token_in_one_page() -> None:
    world = World(SHAPE, config=STRICT)
    world.tick()
    [plan] = world.sent
    [start] = plan.starts
    assert (start.tokens.tolist(), len(start.pages), plan.decode_rows.tolist()) == ([0], 1, [start.row])
    world.tick()
    assert len(world.sent) == 1, "one such step is in flight at a time"
    world.work()
    assert (load(world).steps, load(world).output_tokens, load(world).pages_used) == (0, 0, 0)


def test_an_unproven_worker_changes_no_limits_and_gets_no_request() -> None:
    fleet = Fleet(SHAPE, config=STRICT)
    fleet.run()
    models(fleet)
    unproven = fleet.join_as(replace(SHAPE, max_length=4000, num_pages=2000, max_rows=500))
    assert models(fleet) == []
    streams = [fleet.submit([i] * 5, max_new_tokens=3) for i in range(30)]
    for _ in range(200):
        fleet.tick(0.001)
        fleet.serve("a")
    assert all(fleet.streams[stream].end for stream in streams)
    assert len(fleet.plans_of[unproven]) == 1
    invalid = fleet.refusal(fleet.submit([1] * 200))
    assert invalid.message.endswith("the limit is 100")


def test_the_identity_of_an_unproven_worker_excludes_no_other() -> None:
    fleet = Fleet(config=STRICT)
    fleet.join_as(SHAPE, name="unproven", info={"identity": "unproven"})
    fleet.tick()
    name = fleet.join_as(SHAPE)
    fleet.tick()
    fleet.serve(name)
    assert models(fleet) == [100]
    # Its result comes too late, because a core serves one identity.
    fleet.serve("unproven")
    assert [effect.retry for effect in fleet.effects if isinstance(effect, fx.WorkerRefused)] == [False]
    assert list(fleet.core.lanes) == [name]


def test_a_worker_that_fails_its_first_step_is_retried_then_refused() -> None:
    world = World(SHAPE, config=STRICT, faults=Faults(fail_steps=frozenset(range(1, 9))))
    world.steps(5)
    assert [effect.retry for effect in world.effects if isinstance(effect, fx.WorkerRefused)] == [True]
    assert world.core.lanes == {} and world.core.info is None


def test_the_limits_of_a_worker_end_when_it_leaves() -> None:
    fleet = Fleet(SHAPE, replace(SHAPE, max_length=60), config=greedy(prove_workers=True, max_worker_wait_seconds=10.0))
    fleet.run()
    models(fleet)
    fleet.lose("a")
    assert models(fleet) == [60]


def lose_unproven_workers(fleet: Fleet) -> None:
    for _ in range(2 * DEATHS):
        fleet.lose(fleet.join_as(SHAPE))
        fleet.tick(0.1)


def test_unproven_workers_that_leave_while_a_proven_one_serves_do_not_count_as_crashes() -> None:
    fleet = Fleet(SHAPE, config=STRICT)
    fleet.run()
    lose_unproven_workers(fleet)
    assert not [effect for effect in fleet.effects if isinstance(effect, fx.CoreStatus) and effect.refuses]
    stream = fleet.submit([1, 2], max_new_tokens=3, ignore_eos=True)
    fleet.run()
    assert len(fleet.streams[stream].tokens) == 3


def test_workers_lost_in_their_first_step_make_a_crash_loop() -> None:
    fleet = Fleet(config=STRICT)
    lose_unproven_workers(fleet)
    assert [effect for effect in fleet.effects if isinstance(effect, fx.CoreStatus) and effect.refuses]


def test_workers_refused_for_their_identity_do_not_count_as_crashes() -> None:
    fleet = Fleet(SHAPE, config=STRICT)
    unproven = [fleet.join_as(SHAPE, info={"identity": "unproven"}) for _ in range(DEATHS)]
    fleet.tick()
    for name in ("a", *unproven):
        fleet.serve(name)
    fleet.tick()
    assert list(fleet.core.lanes) == ["a"]
    assert not [effect for effect in fleet.effects if isinstance(effect, fx.CoreStatus) and effect.refuses]
