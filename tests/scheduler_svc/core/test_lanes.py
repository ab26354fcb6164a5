"""Several workers: placement of requests, the loss of a worker, and the independence of the lanes."""

from dataclasses import replace

import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.core.messages.config import MAX_LANES
from scheduler_svc.core.schedule.placement import ROW_TOKENS
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.fleet import Fleet
from tests.scheduler_svc.core.sent_plans import copies, flush, load
from tests.scheduler_svc.core.world import FRONTEND, greedy, text

SHAPE = Shape(page_size=4, num_pages=128, max_rows=8, token_budget=256)


def ask(fleet: Fleet, prompt: list[int], **options: object) -> int:
    return fleet.submit(prompt, **({"max_new_tokens": 6, "ignore_eos": True} | options))


# Placement --------------------------------------------------------------------------------------------------------


def test_equal_lanes_share_the_waiting_requests_evenly() -> None:
    fleet = Fleet(SHAPE, SHAPE)
    streams = [ask(fleet, [i, i, i]) for i in range(6)]
    fleet.tick()
    assert [len(fleet.plans_of[name][0].starts) for name in "ab"] == [3, 3]
    assert (fleet.running("a"), fleet.running("b")) == (streams[::2], streams[1::2])
    assert [one.running for one in load(fleet).per_worker] == [3, 3]
    fleet.finish()


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_burst_fills_all_lanes_in_one_tick(num_workers: int) -> None:
    """A request that one lane leaves to another counts as the other's backlog, so the requests spread over all."""
    fleet = Fleet(*[SHAPE] * num_workers)
    for i in range(8 * num_workers):
        ask(fleet, [i, i, i])
    fleet.tick()
    assert fleet.core.queue.num_waiting == 0
    assert [len(fleet.running(name)) for name in fleet.workers] == [8] * num_workers
    fleet.finish()


def test_uncomputed_prompt_tokens_count_as_backlog() -> None:
    fleet = Fleet(replace(SHAPE, token_budget=64), SHAPE, config=greedy(plans_in_flight=1))
    long, short = ask(fleet, text(200)), ask(fleet, [1])
    fleet.tick()
    assert (fleet.running("a"), fleet.running("b")) == ([long], [short])
    # The first lane has 136 tokens left to compute, a little more than four rows, so its next plan admits no request.
    later = [ask(fleet, [2, i]) for i in range(4)]
    for name in "ab":
        fleet.serve(name)
    fleet.tick()
    assert (fleet.running("a"), fleet.running("b")) == ([long], [short, *later])
    fleet.finish()


@pytest.mark.parametrize("rows_ahead", [1, 2])
def test_placement_weighs_a_cached_prefix_against_the_backlog(rows_ahead: int) -> None:
    """The cached prefix saves 48 tokens, and each row that runs on the lane counts as 32."""
    stem = text(49, 100)
    assert (len(stem) - 1) * 2 > 2 * ROW_TOKENS > len(stem) > ROW_TOKENS
    fleet = Fleet(SHAPE, SHAPE)
    ask(fleet, stem, max_new_tokens=1)
    fleet.run()
    assert (len(fleet.plans_of["a"]), len(fleet.plans_of["b"])) == (1, 0)
    busy = [ask(fleet, [i]) for i in range(2 * rows_ahead)]
    fleet.step()
    for stream in busy[1::2]:
        assert stream in fleet.running("b")
        fleet.cancel(stream)
    assert [len(fleet.running(name)) for name in "ab"] == [rows_ahead, 0]
    again = ask(fleet, [*stem, 7])
    fleet.step()
    assert again in fleet.running("a" if rows_ahead == 1 else "b")
    fleet.settle()
    assert fleet.end(again).stats.cached_prompt_tokens == (48 if rows_ahead == 1 else 0)


def test_placement_prefers_a_younger_lane_with_the_cached_prefix() -> None:
    fleet = Fleet(SHAPE, SHAPE)
    ask(fleet, text(9), max_new_tokens=1)
    ask(fleet, text(9, 50), max_new_tokens=1)
    fleet.run()
    assert (fleet.started("a"), fleet.started("b")) == ([text(9)], [text(9, 50)])
    again = ask(fleet, text(9, 50), max_new_tokens=1)
    fleet.finish()
    assert fleet.end(again).stats.cached_prompt_tokens == 8
    assert fleet.started("b") == [text(9, 50)] * 2


def test_placement_skips_a_full_lane_although_it_has_the_prefix() -> None:
    small = replace(SHAPE, max_rows=1, num_pages=16)
    fleet = Fleet(small, SHAPE)
    ask(fleet, text(17), max_new_tokens=1)
    fleet.run()
    ask(fleet, text(17), max_new_tokens=9)
    fleet.tick()
    # The first lane's only row is seated.
    again = ask(fleet, text(17), max_new_tokens=1)
    fleet.step()
    fleet.finish()
    assert (fleet.end(2).stats.cached_prompt_tokens, fleet.end(again).stats.cached_prompt_tokens) == (16, 0)


def test_a_sample_forks_from_a_sibling_that_has_computed_the_prompt_on_its_lane() -> None:
    """The first sample loses its worker before its first token. It and the third then fork from the second one."""
    fleet = Fleet(replace(SHAPE, max_rows=3), config=greedy(plans_in_flight=1))
    fillers = [ask(fleet, [i], max_new_tokens=30) for i in range(2)]
    fleet.step()
    fleet.join_as(replace(SHAPE, max_rows=1))
    first = ask(fleet, text(10, 50), num_samples=3, temperature=1.0, seed=3)
    fleet.tick()
    assert (fleet.running("a"), fleet.running("b")) == ([*fillers, first + 1], [first])
    fleet.serve("a")
    fleet.lose("b", is_orderly=True)
    for filler in fillers:
        fleet.cancel(filler)
    fleet.tick()
    plan = fleet.plans_of["a"][-1]
    [source] = {page for page, _, _ in copies(plan)}
    assert [start.sample_idx for start in plan.starts] == [0, 2]
    assert source == fleet.lane_of("a").rows.pages[3][2], "the second sample's row is the third"
    fleet.settle()
    assert [len(fleet.streams[first + i].tokens) for i in range(3)] == [6, 6, 6]


# The loss of a worker ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("lost", ["a", "b"])
def test_requests_of_a_lost_worker_resume_on_the_other_with_their_tokens(steps: int, lost: str) -> None:
    fleet = Fleet(SHAPE, SHAPE)
    streams = [ask(fleet, text(6, 20 * i), temperature=i % 2, seed=i) for i in range(4)]
    fleet.steps(steps)
    fleet.tick()
    theirs = fleet.running(lost)
    assert len(theirs) == 2
    known = {stream: list(fleet.streams[stream].tokens) for stream in theirs}
    fleet.lose(lost)
    other = "b" if lost == "a" else "a"
    number = len(fleet.plans_of[other])
    fleet.finish()
    changes = [fleet.end(stream).stats.worker_changes for stream in streams]
    assert changes == [int(stream in theirs) for stream in streams]
    resumed = [start.tokens.tolist() for plan in fleet.plans_of[other][number:] for start in plan.starts]
    assert resumed == [fleet.streams[stream].submit.prompt.tolist() + known[stream] for stream in theirs]


def test_results_of_a_lost_worker_are_ignored() -> None:
    fleet = Fleet(SHAPE, SHAPE)
    for i in range(4):
        ask(fleet, text(6, 20 * i))
    fleet.tick()
    fleet.apply_plans("a")
    lost = fleet.lose("a")
    assert lost.results
    tokens = {number: list(stream.tokens) for number, stream in fleet.streams.items()}
    for result in lost.results:
        assert fleet.handle(lost.event_of(result)) == [fx.AskRejoin(worker="a")]
    assert tokens == {number: list(stream.tokens) for number, stream in fleet.streams.items()}
    fleet.finish()


# Independence of the lanes ----------------------------------------------------------------------------------------


def test_each_lane_has_its_own_generation_steps_and_rows() -> None:
    fleet = Fleet(SHAPE, SHAPE, config=greedy(plans_in_flight=1))
    for i in range(2):
        ask(fleet, [i], max_new_tokens=9)
    fleet.steps(3)
    fleet.tick()
    assert [(fleet.lane_of(name).generation, fleet.lane_of(name).step) for name in "ab"] == [(1, 4), (2, 4)]
    # Both use row 1 and page 1.
    assert [fleet.plans_of[name][0].starts[0].pages.tolist() for name in "ab"] == [[1], [1]]
    fleet.apply_plans("a")
    fleet.workers["a"].results[0].status = pb.STEP_STATUS_OUT_OF_SYNC
    fleet.deliver_from("a")
    assert [(fleet.lane_of(name).generation, fleet.lane_of(name).step) for name in "ab"] == [(3, 0), (2, 4)]
    assert fleet.running("b") == [2]
    assert len(fleet.lane_of("b").in_flight) == 1


def test_a_result_with_the_generation_of_another_lane_is_ignored() -> None:
    fleet = Fleet(SHAPE, SHAPE, config=greedy(plans_in_flight=1))
    for i in range(2):
        ask(fleet, [i], max_new_tokens=3)
    fleet.tick()
    fleet.apply_plans("a")
    event = fleet.workers["a"].event_of(fleet.workers["a"].results[0])
    assert isinstance(event, ev.StepDone)
    # The result has the generation of lane "a", so it is ignored on lane "b".
    assert fleet.handle(replace(event, worker="b")) == []
    assert [stream.tokens for stream in fleet.streams.values()] == [[], []]
    fleet.finish()


def preempted_with_pending_plans() -> Fleet:
    """Returns a fleet in which a second worker joined after the second request was preempted with two pending plans."""
    tight = replace(SHAPE, num_pages=3, max_rows=2, max_length=12)
    fleet = Fleet(tight, config=greedy(plans_in_flight=3))
    for i in range(2):
        ask(fleet, [i, i, i], max_new_tokens=4)
    fleet.tick()
    [victim] = fleet.core.queue.by_request_id("r2")
    assert (victim.row, victim.pending_plans, victim.pending_tokens) == (0, 2, 2)
    fleet.join_as(tight)
    fleet.tick()
    # The request is not admitted there before its pending plans are answered.
    assert fleet.plans_of["b"] == []
    return fleet


def test_pending_tokens_come_from_the_lane_that_preempted_the_request() -> None:
    fleet = preempted_with_pending_plans()
    fleet.apply_plans("b")
    fleet.serve("a")
    fleet.deliver_from("a")
    assert len(fleet.streams[2].tokens) == 2
    fleet.tick()
    assert fleet.started("b") == [[1, 1, 1]]
    fleet.finish()


def test_pending_plans_end_with_the_loss_of_their_lane() -> None:
    fleet = preempted_with_pending_plans()
    fleet.lose("a", is_orderly=True)
    fleet.tick()
    assert fleet.started("b") == [[0, 0, 0], [1, 1, 1]]
    fleet.finish()
    assert [fleet.end(stream).stats.worker_changes for stream in (1, 2)] == [1, 0]


@pytest.mark.parametrize(("requests", "elsewhere"), [(2, [2]), (4, [2, 4])])
def test_suspects_run_on_one_lane_at_a_time(requests: int, elsewhere: list[int]) -> None:
    """The first lane's step fails. One suspect runs there alone, and the other lane runs the requests that it has."""
    fleet = Fleet(config=greedy(plans_in_flight=1))
    fleet.shape = SHAPE
    fleet.join_as(SHAPE, Faults(fail_steps=frozenset({1})))
    fleet.join_as(SHAPE)
    streams = [ask(fleet, [i, 7], max_new_tokens=8) for i in range(requests)]
    fleet.tick()
    fleet.serve("a")
    assert len(fleet.core.suspects) == requests // 2
    fleet.serve("b")
    fleet.tick()
    records = [fleet.lane_of(name).in_flight[-1] for name in "ab"]
    # The handles are equal to the streams here.
    assert [record.handles.tolist() for record in records] == [[streams[0]], elsewhere]
    fleet.finish()
    assert fleet.core.counters.resets == 1


# Joining ----------------------------------------------------------------------------------------------------------


def test_a_worker_beyond_the_maximum_is_refused_and_may_retry() -> None:
    fleet = Fleet(*[SHAPE] * MAX_LANES)
    refused = fleet.handle(ev.WorkerJoined(worker="more", info=fleet.lane_of("a").info))
    assert refused == [
        fx.WorkerRefused(
            worker="more",
            reason=f"{MAX_LANES} workers serve already; this one is accepted when one of them leaves",
            retry=True,
        )
    ]
    fleet.lose("a")
    effects = fleet.core.handle(ev.WorkerJoined(worker="more", info=fleet.lane_of("b").info), fleet.now)
    assert [type(effect) for effect in effects] == [fx.WorkerAccepted, fx.WorkerProven]


def test_the_load_has_sums_and_an_entry_per_worker() -> None:
    fleet = Fleet(SHAPE, replace(SHAPE, num_pages=64, host_pages=3))
    for i in range(3):
        ask(fleet, text(9, 30 * i))
    fleet.step()
    total = load(fleet)
    assert (total.workers, total.running, total.pages_total, total.host_pages_total) == (2, 3, 127 + 63, 3)
    assert [(one.running, one.pages_used, one.pages_total) for one in total.per_worker] == [(2, 6, 127), (1, 3, 63)]
    assert total.pages_used == 9
    fleet.run()
    assert [one.pages_cached for one in load(fleet).per_worker] == [6, 3]
    # Each request left two cached pages of its prompt, and one of prompt and output.
    assert flush(fleet) == 9


# Workers of different sizes ---------------------------------------------------------------------------------------

LARGE, SMALL = replace(SHAPE, max_length=100), replace(SHAPE, max_length=40)


def two_sizes() -> tuple[Fleet, int]:
    """Returns a fleet of a large and a small worker, and a stream that runs on the large one and fits only there."""
    fleet = Fleet(LARGE, SMALL)
    long = ask(fleet, text(30), max_new_tokens=40)
    fleet.steps(4)
    assert (fleet.running("a"), fleet.running("b")) == ([long], [])
    return fleet, long


def test_a_request_too_long_for_the_present_workers_is_set_aside_until_another_joins() -> None:
    fleet, long = two_sizes()
    fleet.lose("a")
    fleet.tick()
    num_tokens = len(fleet.streams[long].tokens)
    others = [ask(fleet, text(6, 50 + i)) for i in range(3)]
    fleet.run()
    # The request blocks no other, and still counts as waiting.
    assert [len(fleet.streams[stream].tokens) for stream in others] == [6] * 3
    assert (load(fleet).waiting, load(fleet).waiting_tokens) == (1, 30 + num_tokens)
    fleet.join_as(LARGE)
    fleet.finish()
    assert len(fleet.streams[long].tokens) == 40
    assert fleet.end(long).stats.worker_changes == 1


@pytest.mark.parametrize("how", ["cancel", "abort", "deadline"])
def test_a_request_that_was_set_aside_may_end(how: str) -> None:
    fleet, _ = two_sizes()
    fleet.lose("a")
    fleet.run()
    aside = 2
    fleet.join_as(LARGE)
    assert ask(fleet, text(30, 60), max_new_tokens=40, deadline_seconds=9.0) == aside
    fleet.lose("c")
    fleet.run()
    assert load(fleet).waiting == 2
    match how:
        case "cancel":
            fleet.cancel(aside)
        case "abort":
            fleet.handle(ev.Abort(frontend=FRONTEND, query=1, request_ids=("r2",)))
        case _:
            fleet.tick(10.0)
            assert fleet.failure(aside).code is fx.FailureCode.DEADLINE
    assert load(fleet).waiting == 1
    assert (fleet.streams[aside].end is None) == (how == "cancel")
    fleet.join_as(LARGE)
    fleet.settle()


def test_the_largest_present_worker_sets_the_limits_for_new_requests() -> None:
    fleet = Fleet(SMALL, LARGE)
    fits, cut = ask(fleet, text(60), max_new_tokens=40), ask(fleet, text(60, 9), max_new_tokens=41)
    fleet.finish()
    assert [fleet.end(stream).reason for stream in (fits, cut)] == [fx.EndReason.LENGTH, fx.EndReason.CONTEXT_FULL]
    rejected = fleet.refusal(ask(fleet, text(100)))
    assert rejected.message == "the prompt and one output token make 101 tokens; the limit is 100"
