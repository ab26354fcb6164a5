"""A request that fits is admitted although another one waits: for pages, for a sibling, for an overdue worker."""

from scheduler_svc.core.messages.config import CoreConfig
from scheduler_svc.core.queue.turns import AGEING_TOKENS
from scheduler_svc.core.state.lane import OVERDUE_SECONDS
from scheduler_svc.core.state.request import Request
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.sent_plans import first_positions, prompts_started
from tests.scheduler_svc.core.world import World, greedy


def test_a_request_that_does_not_fit_does_not_block_the_head_that_it_would_pass() -> None:
    """A page of the long request is cached, so it would pass the head. It needs twelve pages and the head needs one."""
    world = World(Shape(page_size=4, num_pages=16), greedy())
    world.submit([1, 2, 3, 4, 5], max_new_tokens=1, ignore_eos=True)
    world.run()
    world.submit([9] * 20, max_new_tokens=24, ignore_eos=True)
    world.step()
    head = world.submit([7, 7], max_new_tokens=2, ignore_eos=True)
    world.submit([1, 2, 3, 4] + [8] * 44, max_new_tokens=2, ignore_eos=True)
    world.step()
    assert prompts_started(world)[-1] == [7, 7]
    assert world.streams[head].admitted
    world.finish()


def test_a_sample_forks_at_once_although_a_later_request_does_not_fit() -> None:
    """While the second sample waits for the first to compute the prompt, a request behind it does not fit."""
    world = World(Shape(page_size=4, num_pages=24, token_budget=16, max_rows=8), greedy(plans_in_flight=1))
    world.submit([1] * 4, max_new_tokens=40, ignore_eos=True)
    world.step()
    prompt = list(range(20))
    world.submit(prompt, num_samples=2, max_new_tokens=4, ignore_eos=True)
    world.submit([5] * 70, max_new_tokens=2, ignore_eos=True)
    world.steps(4)
    assert prompts_started(world) == [[1] * 4, prompt, prompt]
    assert first_positions(world) == [0, 0, 19]
    world.finish()


def test_an_urgent_request_does_not_put_its_tenants_backlog_before_others() -> None:
    world = World(Shape(max_rows=1, num_pages=16), CoreConfig(max_waiting=200))
    for i in range(50):
        world.submit([1, i], max_new_tokens=10, ignore_eos=True, salt="batch")
    world.submit([2, 2], max_new_tokens=1, ignore_eos=True, salt="batch", priority=1)
    world.step()
    other = world.submit([3, 3], max_new_tokens=1, ignore_eos=True, salt="other")
    world.finish()
    assert AGEING_TOKENS > 50 * 12
    order = prompts_started(world)
    assert order.index([3, 3]) < 4, f"place {order.index([3, 3])} of {len(order)}"
    assert world.streams[other].end


def test_placement_skips_a_lane_with_an_overdue_step() -> None:
    """The overdue lane has the smaller backlog, so it would start the request sooner if it answered."""
    fleet = Fleet(Shape(), Shape(), config=greedy(silence_timeout_seconds=1000.0))
    for i in range(6):
        fleet.submit([i, i], max_new_tokens=200, ignore_eos=True)
    fleet.step()
    for stream in fleet.running("b")[1:]:
        fleet.cancel(stream)
    fleet.tick()
    new = fleet.submit([9, 9], max_new_tokens=2, ignore_eos=True)
    for _ in range(5):
        fleet.tick(OVERDUE_SECONDS / 2)
        fleet.serve("a")
    assert fleet.end(new).stats.output_tokens == 2
    assert fleet.now < fleet.core.config.step_timeout_seconds
    fleet.settle()


def test_a_head_with_pending_plans_on_one_lane_does_not_block_other_lanes() -> None:
    """The head of the queue was preempted, and the worker with its pending tokens does not answer."""
    shape = Shape(page_size=4, max_rows=4, num_pages=8)
    fleet = Fleet(shape, shape, config=greedy(silence_timeout_seconds=1000.0))
    for i in range(6):
        fleet.submit([i] * 6, max_new_tokens=20, ignore_eos=True)
    pending: list[Request] = []
    while not pending:
        for name in fleet.workers:
            fleet.serve(name)
        fleet.tick()
        pending = [request for request in fleet.core.queue.waiting() if request.pending_plans]
    silent = "a" if fleet.lane_of("a").awaits(pending[0]) else "b"
    other = "b" if silent == "a" else "a"
    for stream in fleet.running(other):
        fleet.cancel(stream)
    new = fleet.submit([9, 9], max_new_tokens=2, ignore_eos=True)
    for _ in range(40):
        fleet.tick(1.0)
        fleet.serve(other)
    assert pending[0].pending_plans
    assert fleet.end(new).stats.output_tokens == 2
    fleet.settle()
