"""Exact plans, step by step: a table per scenario that can be checked by hand."""

from dataclasses import dataclass

import numpy as np
import pytest

from scheduler_svc.core.messages.config import Admission, Policy
from scheduler_svc.core.messages.plan import Plan
from scheduler_svc.core.queue.request_queue import RequestQueue
from scheduler_svc.core.schedule.placement import Placement
from scheduler_svc.core.schedule.plan_builder import Counters, PlanBuilder
from scheduler_svc.core.schedule.planner import plan_step
from scheduler_svc.core.state.lane import Lane
from scheduler_svc.core.state.request import Move
from tests.rigs.executor import Shape
from tests.scheduler_svc.core.bare import bare_request
from tests.scheduler_svc.core.world import World, greedy, info_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One plan: `starts` (row, pages), `appends` (row, page), `chunks` (row, start, count, samples), decode rows."""

    starts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    appends: tuple[tuple[int, int], ...] = ()
    chunks: tuple[tuple[int, int, int, bool], ...] = ()
    decode: tuple[int, ...] = ()


def seen(plan: Plan) -> Expected:
    chunks = zip(plan.chunk_rows, plan.chunk_starts, plan.chunk_counts, plan.chunk_samples, strict=True)
    return Expected(
        starts=tuple((start.row, tuple(start.pages.tolist())) for start in plan.starts),
        appends=tuple(zip(plan.append_rows.tolist(), plan.append_pages.tolist(), strict=True)),
        chunks=tuple((int(row), int(start), int(count), bool(samples)) for row, start, count, samples in chunks),
        decode=tuple(plan.decode_rows.tolist()),
    )


def lockstep(world: World, steps: int) -> None:
    """Steps with two plans in flight before each result, as for a busy worker, then ticks once more."""
    world.steps(steps)
    world.tick()


def test_a_prompt_runs_in_chunks_then_decodes_across_a_page_edge() -> None:
    world = World(Shape(page_size=4, num_pages=10, token_budget=8, max_rows=2, chunk_align=2))
    world.submit(list(range(11)), max_new_tokens=4, ignore_eos=True)
    lockstep(world, 5)
    assert [seen(plan) for plan in world.sent] == [
        Expected(starts=((1, (1, 2, 3)),), chunks=((1, 0, 8, False),)),
        Expected(chunks=((1, 8, 3, True),)),
        Expected(decode=(1,)),
        Expected(appends=((1, 4),), decode=(1,)),
        Expected(decode=(1,)),
    ]
    assert [plan.step for plan in world.sent] == [1, 2, 3, 4, 5]


def test_decode_rows_go_first_and_the_prompt_gets_the_rest_of_the_budget() -> None:
    world = World(Shape(page_size=4, num_pages=20, token_budget=9, max_rows=3, chunk_align=4))
    world.submit([1, 2], max_new_tokens=9, ignore_eos=True)
    world.submit([3], max_new_tokens=9, ignore_eos=True)
    world.tick()
    world.submit(list(range(10)), max_new_tokens=2, ignore_eos=True)
    lockstep(world, 4)
    assert [seen(plan) for plan in world.sent[:6]] == [
        # The prompt of one token needs no chunk. It is a decode row from the start.
        Expected(starts=((1, (1,)), (2, (2,))), chunks=((1, 0, 2, True),), decode=(2,)),
        Expected(decode=(1, 2)),
        Expected(starts=((3, (3, 4, 5)),), chunks=((3, 0, 4, False),), decode=(1, 2)),
        Expected(appends=((1, 6),), chunks=((3, 4, 4, False),), decode=(1, 2)),
        Expected(appends=((2, 7),), chunks=((3, 8, 2, True),), decode=(1, 2)),
        Expected(decode=(1, 2, 3)),
    ]


def test_two_plans_are_in_flight_and_no_more(world: World) -> None:
    world.submit([1, 2, 3], max_new_tokens=9, ignore_eos=True)
    world.tick()
    world.tick()
    assert [seen(plan).decode for plan in world.sent] == [(), (1,)]
    world.apply()
    world.tick()
    assert len(world.sent) == 2
    world.deliver()
    world.tick()
    assert len(world.sent) == 3


def test_preemption_frees_a_page_in_the_same_step_and_the_victim_resumes() -> None:
    world = World(Shape(page_size=2, num_pages=4, token_budget=8, max_rows=2))
    world.submit([1, 2], max_new_tokens=5, ignore_eos=True)
    world.submit([3, 4], max_new_tokens=3, ignore_eos=True)
    world.finish()
    plans = [seen(plan) for plan in world.sent]
    assert plans[0] == Expected(starts=((1, (1,)), (2, (2,))), chunks=((1, 0, 2, True), (2, 0, 2, True)))
    # Page 3 goes to the older request. No row is after the newer one in the order, so it is preempted itself.
    assert plans[1] == Expected(appends=((1, 3),), decode=(1,))
    resumed = next(plan for plan in plans[2:] if plan.starts)
    assert len(resumed.starts) == 1
    tokens = next(plan for plan in world.sent[2:] if plan.starts).starts[0].tokens.tolist()
    assert tokens[:2] == [3, 4]
    assert len(tokens) == 3, "the token that was in flight at the preemption is known"


@pytest.mark.parametrize(
    ("known", "chunks"), [(3, [3]), (8, [8]), (9, [8]), (10, [8, 2]), (16, [8, 8]), (18, [8, 8, 2])]
)
def test_chunks_fill_the_token_budget(known: int, chunks: list[int]) -> None:
    world = World(Shape(page_size=4, num_pages=20, token_budget=8, max_rows=1, chunk_align=1))
    world.submit(list(range(known)), max_new_tokens=1, ignore_eos=True)
    world.run()
    assert [int(count) for plan in world.sent for count in plan.chunk_counts] == chunks
    # One remaining position needs no chunk. It is a decode row.
    rest = known - sum(chunks)
    assert [len(plan.decode_rows) for plan in world.sent] == [0] * len(chunks) + [1] * rest
    flags = [bool(flag) for plan in world.sent for flag in plan.chunk_samples]
    assert flags == [False] * (len(chunks) - 1) + [rest == 0]


@pytest.mark.parametrize(
    ("token_us", "first", "beside"),
    [
        pytest.param(600.0, 200, 0, id="slow worker: the prompt that ends has more tokens than ENDING_TOKENS"),
        pytest.param(600.0, 40, 64, id="slow worker: chunks up to ENDING_TOKENS, in multiples of chunk_align"),
        pytest.param(200.0, 40, 192, id="faster worker: chunks up to ENDING_SECONDS, in multiples of chunk_align"),
        pytest.param(200.0, 250, 0, id="faster worker: the prompt that ends takes ENDING_SECONDS"),
        pytest.param(10.0, 200, 256, id="fast worker: the whole budget takes less than ENDING_SECONDS"),
        pytest.param(0.0, 200, 256, id="unknown speed"),
    ],
)
def test_a_prompt_that_ends_does_not_wait_for_long_chunks_of_others(token_us: float, first: int, beside: int) -> None:
    shape = Shape(
        page_size=64, num_pages=32, max_rows=4, max_length=1024, token_budget=512, chunk_align=64, token_us=token_us
    )
    world = World(shape)
    world.submit([1] * first, max_new_tokens=4, ignore_eos=True)
    world.submit([2] * 800, max_new_tokens=4, ignore_eos=True)
    lockstep(world, 2)
    chunks = [seen(plan).chunks for plan in world.sent[:2]]
    assert chunks[0] == ((1, 0, first, True), *([(2, 0, beside, False)] if beside else []))
    # The next step has the decode row and the rest of its budget for the other prompt.
    assert chunks[1] == ((2, beside, 448, False),)
    assert world.sent[1].decode_rows.tolist() == [1]
    world.finish()


def test_no_two_plans_have_the_same_checksum() -> None:
    """The executor compares each checksum with its tables. This test shows that the checksum is not constant."""
    world = World(Shape(page_size=2, num_pages=9))
    world.submit([1, 2, 3], max_new_tokens=6, ignore_eos=True)
    world.run()
    checksums = [plan.checksum for plan in world.sent]
    assert len(set(checksums)) == len(checksums)
    assert all(0 <= checksum < 1 << 64 for checksum in checksums)


def test_a_plan_does_not_change_after_it_is_sent() -> None:
    world = World(Shape(page_size=2, num_pages=12))
    world.submit([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    world.tick()
    plan = world.sent[0]
    before = [np.array(getattr(plan, name), copy=True) for name in ("chunk_rows", "chunk_starts", "chunk_counts")]
    pages, tokens = plan.starts[0].pages.copy(), plan.starts[0].tokens.copy()
    world.run()
    for name, array in zip(("chunk_rows", "chunk_starts", "chunk_counts"), before, strict=True):
        assert np.array_equal(getattr(plan, name), array)
    assert np.array_equal(plan.starts[0].pages, pages)
    assert np.array_equal(plan.starts[0].tokens, tokens)


def test_a_step_with_a_preemption_admits_no_request() -> None:
    world = World(Shape(page_size=2, num_pages=4, max_rows=3), greedy(plans_in_flight=1))
    world.submit([1, 2], max_new_tokens=4, ignore_eos=True, priority=2)
    world.submit([3, 4, 5], max_new_tokens=2, ignore_eos=True)
    world.tick()
    # This request would fit in the second page that the victim leaves, but waits for the next step.
    world.submit([6], max_new_tokens=2, ignore_eos=True, priority=1)
    lockstep(world, 2)
    assert [seen(plan) for plan in world.sent] == [
        Expected(starts=((1, (1,)), (2, (2, 3))), chunks=((1, 0, 2, True), (2, 0, 3, True))),
        Expected(appends=((1, 3),), decode=(1,)),
        Expected(starts=((2, (2,)),), decode=(1, 2)),
    ]
    world.finish()


def test_pages_go_to_the_first_in_the_queue_order() -> None:
    world = World(Shape(page_size=4, num_pages=9), greedy(plans_in_flight=1))
    world.submit([1, 2], max_new_tokens=5, ignore_eos=True)
    world.tick()
    world.submit([3, 4, 5], max_new_tokens=5, ignore_eos=True, priority=1)
    lockstep(world, 3)
    assert [seen(plan) for plan in world.sent[1:]] == [
        Expected(starts=((2, (2,)),), chunks=((2, 0, 3, True),), decode=(1,)),
        Expected(decode=(1, 2)),
        Expected(appends=((2, 3), (1, 4)), decode=(1, 2)),
    ]


def two_running_prompts(token_budget: int, prompt_logprobs_from: int = 0, spare_logit_rows: int = 0) -> Plan:
    """Returns a plan for two prompts that are seated but not begun, while a request of one token waits.

    Row 1 has a prompt of 9 tokens, row 2 one of 6 tokens that goes before it, and the waiting request goes before both.
    The planner never creates this state itself.
    """
    sizes = {"token_budget": token_budget, "spare_logit_rows": spare_logit_rows}
    shape = Shape(page_size=4, num_pages=20, max_rows=3, chunk_align=4, **sizes)
    lane = Lane(worker="w", number=1, info=info_of(shape), generation=1, now=0.0)
    queue = RequestQueue()
    for handle, length, priority in [(1, 9, 0), (2, 6, 1)]:
        request = bare_request(
            handle,
            prompt=np.arange(length, dtype=np.int32),
            priority=priority,
            prompt_logprobs_from=prompt_logprobs_from,
        )
        request.move(Move.ADMIT)
        pages = lane.pool.allocate(lane.pages_for(length))
        assert pages is not None
        lane.rows.seat(request, pages, frontend_idx=1, first_position=0, held_from=0)
    queue.add(bare_request(3, priority=2))
    builder = PlanBuilder(
        lane=lane,
        queue=queue,
        placement=Placement((lane,)),
        frontends={},
        counters=Counters(),
        policy=Policy(admission=Admission.KNOWN),
        now=0.0,
        bytes_left=1 << 20,
    )
    plan = plan_step(builder)
    assert plan is not None
    return plan


def test_running_prompts_continue_in_the_queue_order() -> None:
    assert seen(two_running_prompts(16)).chunks == ((2, 0, 6, True), (1, 0, 8, False))


def test_a_running_prompt_without_budget_prevents_admission() -> None:
    assert seen(two_running_prompts(10)) == Expected(chunks=((2, 0, 6, True),))
    # If both prompts got positions, the waiting request gets the rest.
    assert seen(two_running_prompts(13)) == Expected(
        starts=((3, (6,)),), chunks=((2, 0, 6, True), (1, 0, 4, False)), decode=(3,)
    )


@pytest.mark.parametrize(
    ("logits", "chunks"),
    [
        # Three rows may sample. The other logit rows go to the first prompt in the order, then to the other.
        (4, ((2, 0, 4, False),)),
        (8, ((2, 0, 6, True),)),
        (9, ((2, 0, 6, True), (1, 0, 4, False))),
        (13, ((2, 0, 6, True), (1, 0, 9, True))),
    ],
)
def test_a_running_prompt_without_logit_rows_does_not_prevent_admission(
    logits: int, chunks: tuple[tuple[int, int, int, bool], ...]
) -> None:
    plan = two_running_prompts(32, prompt_logprobs_from=1, spare_logit_rows=logits)
    assert seen(plan) == Expected(starts=((3, (6,)),), chunks=chunks, decode=(3,))
