"""Host pages: what a preemption swaps out, what is swapped in again, and when host pages become void.

Pages have four tokens. In the usual scene there are five pages and two prompts of seven tokens. In the third plan both
need a third page and one is unused, so the newer request is preempted with two full pages. The older one takes one of
them later.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.pages.host_pool import HostPool
from scheduler_svc.core.schedule.policy import swapping_pays
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import first_positions, flush, load, starts, swap_ins, swap_outs
from tests.scheduler_svc.core.world import World, greedy, info_of

SHAPE = Shape(page_size=4, num_pages=6, host_pages=8, page_copy_us=1.0, token_us=50.0)
OLDER, NEWER = [10 + i for i in range(7)], [50 + i for i in range(7)]


def scene(
    shape: Shape = SHAPE,
    *,
    newer: list[int] = NEWER,
    faults: Faults | None = None,
    in_flight: int = 1,
    **options: object,
) -> World:
    """Returns a world before the third plan."""
    world = World(shape, greedy(plans_in_flight=in_flight), faults=faults)
    world.submit(OLDER, max_new_tokens=9, ignore_eos=True)
    world.submit(newer, **({"max_new_tokens": 9, "ignore_eos": True} | options))
    world.steps(2)
    return world


def all_swap_outs(world: World) -> list[tuple[int, int]]:
    return [pair for plan in world.sent for pair in swap_outs(plan)]


def all_swap_ins(world: World) -> list[tuple[int, int]]:
    return [pair for plan in world.sent for pair in swap_ins(plan)]


# Swapping out -----------------------------------------------------------------------------------------------------


def test_a_preempted_request_is_swapped_out_first_pages_first_and_resumes_in_full() -> None:
    world = scene()
    world.step()
    third = world.sent[2]
    assert (swap_outs(third), third.append_pages.tolist()) == ([(3, 0), (4, 1)], [5])
    assert (load(world).host_pages_used, load(world).host_pages_total) == (2, 8)
    world.finish()
    # The older request took page 4. Page 3 is still on the device, and the content of page 4 comes from host page 1.
    assert starts(world)[2] == (8, [3, 4, 5])
    assert all_swap_ins(world) == [(1, 4)]
    stats = world.end(2).stats
    assert (stats.preemptions, stats.recomputed_tokens) == (1, 0)
    # The host pages stay for requests with the same prefix.
    assert load(world).host_pages_used == 2


@pytest.mark.parametrize(
    ("host_pages", "page_copy_us", "token_us", "pays"),
    [
        (8, 99.0, 50.0, True),
        (8, 100.0, 50.0, False),  # two copies take as long as four tokens
        (8, 1.0, 0.5, False),
        (8, 0.0, 0.0, False),
        (8, 0.0, 50.0, True),
        (0, 1.0, 50.0, False),
    ],
)
def test_pages_are_swapped_out_if_two_copies_cost_less_than_computing_them(
    host_pages: int, page_copy_us: float, token_us: float, pays: bool
) -> None:
    shape = replace(SHAPE, host_pages=host_pages, page_copy_us=page_copy_us, token_us=token_us)
    assert swapping_pays(info_of(shape)) is pays
    world = scene(shape)
    world.finish()
    assert len(all_swap_outs(world)) == (2 if pays else 0)
    assert world.end(2).stats.recomputed_tokens == (0 if pays else 4)


def test_the_first_pages_are_swapped_out_if_host_memory_is_small() -> None:
    world = scene(replace(SHAPE, host_pages=1))
    world.finish()
    assert all_swap_outs(world) == [(3, 0)]
    # The first page was still on the device.
    assert all_swap_ins(world) == []
    assert world.end(2).stats.recomputed_tokens == 4


def test_pages_that_other_rows_share_are_not_swapped_out() -> None:
    world = scene(replace(SHAPE, num_pages=5), newer=OLDER, temperature=1.0, seed=3)
    assert starts(world) == [(0, [1, 2]), (4, [1, 3])]
    world.finish()
    # Page 1 is shared with the older request.
    assert all_swap_outs(world) == [(3, 0)]


@pytest.mark.parametrize("options", [{"cache_write": False}, {"salt": None}])
def test_uncached_pages_are_not_swapped_out(options: dict[str, object]) -> None:
    world = scene(**options)
    world.finish()
    assert all_swap_outs(world) == []
    assert world.end(2).stats.recomputed_tokens == 8


def test_output_pages_of_unconfirmed_steps_are_not_swapped_out() -> None:
    """Three plans in one tick: no output token is known, and the prompt's full page is planned and therefore cached."""
    world = World(SHAPE, greedy(plans_in_flight=3))
    for prompt in (OLDER, NEWER):
        world.submit(prompt, max_new_tokens=9, ignore_eos=True)
    world.tick()
    assert [swap_outs(plan) for plan in world.sent] == [[], [], [(3, 0)]]
    world.finish()


def test_a_swap_out_without_a_plan_is_undone() -> None:
    """The older request's last position is in flight when the newer one needs a page, so no row is left to plan."""
    world = World(replace(SHAPE, num_pages=5), greedy(plans_in_flight=3))
    world.submit(OLDER, max_new_tokens=2, ignore_eos=True)
    world.submit(NEWER, max_new_tokens=9, ignore_eos=True)
    world.tick()
    assert len(world.sent) == 2
    assert world.core.counters.preemptions == 1
    assert load(world).host_pages_used == 0
    world.finish()
    assert all_swap_outs(world) == []


# Swapping in ------------------------------------------------------------------------------------------------------


def test_another_request_with_the_same_prefix_swaps_pages_in() -> None:
    world = scene()
    world.run()
    # This request allocates all pages of the device.
    world.submit([100 + i for i in range(17)], max_new_tokens=3, ignore_eos=True)
    world.run()
    number = len(world.sent)
    turn = [*NEWER, *world.streams[2].tokens]
    again = world.submit([*turn[:8], 200, 201], max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert world.end(again).stats.cached_prompt_tokens == 8
    assert [slot for slot, _ in swap_ins(world.sent[number])] == [0, 1]
    # Pages that were swapped in are cached again, so the next request shares them on the device.
    world.submit([*turn[:8], 202], max_new_tokens=2, ignore_eos=True)
    world.finish()
    assert first_positions(world)[-1] == 8
    assert len(all_swap_ins(world)) == 3


# Void host pages --------------------------------------------------------------------------------------------------


def swapped_out_and_confirmed() -> World:
    world = scene()
    world.step()
    assert load(world).host_pages_used == 2
    return world


@pytest.mark.parametrize(
    ("status", "left"),
    [
        (pb.STEP_STATUS_FAILED, 2),
        (pb.STEP_STATUS_OUT_OF_MEMORY, 2),
        (pb.STEP_STATUS_OUT_OF_SYNC, 0),
        (pb.STEP_STATUS_SKIPPED, 0),
    ],
)
def test_host_pages_of_confirmed_plans_survive_a_failed_step(status: int, left: int) -> None:
    world = swapped_out_and_confirmed()
    world.tick()
    world.apply()
    world.results[0].status = status
    world.deliver()
    assert load(world).host_pages_used == left


def test_host_pages_of_a_failed_plan_are_evicted() -> None:
    world = scene(faults=Faults(fail_steps=frozenset({3})))
    world.tick()
    assert load(world).host_pages_used == 2
    world.work()
    assert load(world).host_pages_used == 0
    world.finish()


def test_a_flush_evicts_and_counts_host_pages() -> None:
    world = swapped_out_and_confirmed()
    # Two pages in host memory, and on the device these two and two of the older request.
    assert flush(world) == 2 + 4
    assert (load(world).host_pages_used, load(world).pages_cached) == (0, 0)
    world.finish()
    assert all_swap_ins(world) == []
    assert first_positions(world) == [0, 0, 0]


# The host pool by itself ------------------------------------------------------------------------------------------


def test_a_page_in_host_memory_is_not_stored_again_and_tokens_are_compared() -> None:
    pool = HostPool(2)
    assert pool.store(b"a", b"tokens", unverified=True) == 0
    assert pool.store(b"a", b"tokens", unverified=False) is None
    assert pool.find(b"a", b"others") is None
    assert pool.is_unverified(b"a")
    assert not pool.is_unverified(b"b")


@given(
    st.integers(0, 3), st.lists(st.tuples(st.sampled_from(["store", "touch", "evict", "evict all"]), st.integers(0, 5)))
)
def test_the_host_pool_behaves_like_a_list(num_slots: int, operations: list[tuple[str, int]]) -> None:
    pool, names, slots = HostPool(num_slots), list[bytes](), dict[bytes, int]()
    for what, number in operations:
        name = bytes([number])
        if what == "store":
            slot = pool.store(name, name, unverified=False)
            if name in names or not num_slots:
                assert slot is None
                continue
            assert slot is not None
            if len(names) == num_slots:
                assert slots.pop(names.pop(0)) == slot
            assert slot not in slots.values()
            names.append(name)
            slots[name] = slot
        elif what == "touch" and name in names:
            pool.touch(name)
            names.append(names.pop(names.index(name)))
        elif what == "evict":
            pool.evict(name)
            if name in names:
                names.remove(name)
                del slots[name]
        elif what == "evict all":
            assert pool.evict_all() == len(names)
            names, slots = [], {}
        pool.audit()
        assert pool.num_used == len(names)
        for one, slot in slots.items():
            found = pool.find(one, one)
            assert found is not None
            assert found.slot == slot
