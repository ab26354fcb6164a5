"""A trial whose lane is lost does not hold up the suspects that fit the remaining workers."""

from dataclasses import replace

from tests.rigs.executor import Shape
from tests.scheduler_svc.core.world import World, greedy

LARGE = Shape(page_size=4, num_pages=64, max_rows=4, max_length=64, token_budget=64)


def test_a_trial_that_fits_no_worker_gives_way_to_one_that_does() -> None:
    world = World(LARGE, greedy(plans_in_flight=2))
    long = world.submit([1, 2, 3], max_new_tokens=40, ignore_eos=True)
    short = world.submit([4, 5, 6], max_new_tokens=8, ignore_eos=True)
    world.step()
    world.tick()
    world.kill()
    suspects = world.core.suspects
    assert len(suspects.handles) == 2
    # The next worker is lost when the trial of the long request has a lane, and no plan in flight.
    world.join()
    for _ in range(20):
        world.step()
        if suspects.members() and not world.plans:
            break
    assert [request.stream for request in suspects.members()] == [long]
    world.kill()
    world.shape = replace(LARGE, max_length=16)
    world.join()
    world.run()
    assert world.end(short).reason is not None
    assert world.end_of(long) is None
    world.shape = LARGE
    world.join()
    world.run()
    world.check_content()
    assert world.end(long).reason is not None and not suspects.handles
