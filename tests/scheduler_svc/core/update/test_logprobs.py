"""Logprobs of outputs and prompts: exact plans with limited logit rows, and each logprob sent exactly once."""

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from scheduler_svc.wire import worker as worker_wire
from tests.rigs.executor import Shape
from tests.rigs.faults import Faults
from tests.scheduler_svc.core.sent_plans import chunks
from tests.scheduler_svc.core.world import FRONTEND, World, greedy, prompt

ONE = greedy(plans_in_flight=1)
# As `num_logprobs` counts them.
TWO_BEST = 3


def starts_of(world: World) -> list[tuple[int, int]]:
    """Returns (row, first position with prompt logprobs) of every started row."""
    return [(start.row, start.prompt_logprobs_from) for plan in world.sent for start in plan.starts]


def pieces_of(world: World, stream: int = 1) -> list[tuple[int, int]]:
    """Returns (start, count) of every piece of prompt logprobs that the stream got."""
    outputs = world.told(fx.StepOutput)
    pieces = [piece for output in outputs for piece in output.prompt_logprobs if piece.stream == stream]
    return [(piece.start, len(piece.values.logprobs)) for piece in pieces]


# Plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted_from", "logits", "expected"),
    [
        (0, 4, [(0, 16), (16, 4)]),
        (1, 100, [(0, 16), (16, 4)]),
        # Positions 0 to 15 give the logprobs of 1 to 16.
        (1, 16, [(0, 16), (16, 4)]),
        (1, 15, [(0, 12), (12, 8)]),
        (1, 4, [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4)]),
        # The last position gives no prompt logprob, so seven are left after twelve positions.
        (1, 7, [(0, 4), (4, 4), (8, 4), (12, 8)]),
        # Positions without wanted logprobs take no logit rows.
        (13, 4, [(0, 16), (16, 4)]),
        (12, 4, [(0, 12), (12, 4), (16, 4)]),
        (10, 4, [(0, 12), (12, 4), (16, 4)]),
        (19, 4, [(0, 16), (16, 4)]),
        # Position 20 does not exist.
        (20, 4, [(0, 16), (16, 4)]),
    ],
)
def test_chunks_are_cut_to_the_available_logit_rows(
    wanted_from: int, logits: int, expected: list[tuple[int, int]]
) -> None:
    shape = Shape(page_size=4, num_pages=20, max_rows=1, chunk_align=4, token_budget=16, spare_logit_rows=logits)
    world = World(shape, ONE)
    world.submit(prompt(20), max_new_tokens=1, ignore_eos=True, prompt_logprobs_from=wanted_from)
    world.run()
    assert [(start, count) for plan in world.sent for _, start, count in chunks(plan)] == expected
    world.check_all_ended()
    assert sum(count for _, count in pieces_of(world)) == (20 - wanted_from if wanted_from else 0)


def test_the_last_prompt_position_alone_decodes_without_prompt_logprobs() -> None:
    world = World(Shape(page_size=4, num_pages=20, max_rows=1, chunk_align=4, token_budget=16), ONE)
    world.submit(prompt(17), max_new_tokens=2, ignore_eos=True, prompt_logprobs_from=1)
    world.run()
    assert [(chunks(plan), plan.decode_rows.tolist()) for plan in world.sent] == [
        ([(1, 0, 16)], []),
        ([], [1]),
        ([], [1]),
    ]
    world.check_all_ended()
    assert pieces_of(world) == [(1, 16)]


def test_a_prompt_of_one_token_has_no_prompt_logprobs(world: World) -> None:
    world.submit([5], prompt_logprobs_from=1)
    world.finish()
    assert starts_of(world) == [(1, 0)]


def test_every_row_that_may_sample_keeps_a_logit_row() -> None:
    # There are 6 logit rows. Two rows may sample, so the prompt gets 4 until the other request has ended.
    shape = Shape(page_size=4, num_pages=20, max_rows=2, chunk_align=2, token_budget=30, spare_logit_rows=4)
    world = World(shape, ONE)
    world.submit([1], max_new_tokens=2, ignore_eos=True)
    world.submit(prompt(14), max_new_tokens=1, ignore_eos=True, prompt_logprobs_from=1)
    world.finish()
    assert [chunks(plan) for plan in world.sent] == [[(2, 0, 4)], [(2, 4, 4)], [(2, 8, 6)]]


def test_the_first_prompt_gets_the_logit_rows_and_requests_without_logprobs_pass_it() -> None:
    shape = Shape(page_size=4, num_pages=40, max_rows=4, chunk_align=4, token_budget=60, spare_logit_rows=4)
    world = World(shape, ONE)
    first, second = (world.submit(prompt(9, i), max_new_tokens=1, prompt_logprobs_from=1) for i in range(2))
    plain = [world.submit(prompt(6, 7 + i), max_new_tokens=1, ignore_eos=True) for i in range(2)]
    world.finish()
    # Eight logit rows and four rows that may sample, so four are left. The second prompt waits and blocks no request.
    assert [chunks(plan) for plan in world.sent[:2]] == [
        [(1, 0, 4), (2, 0, 6), (3, 0, 6)],
        # Two rows may sample, so six logit rows are left. The first prompt takes four, and two are too few for a chunk.
        [(1, 4, 5)],
    ]
    # The second prompt alone has seven.
    assert [chunk[1:] for plan in world.sent[2:] for chunk in chunks(plan)] == [(0, 4), (4, 5)]
    assert [len(world.streams[stream].tokens) for stream in (first, second, *plain)] == [1, 1, 1, 1]


# Sent once ---------------------------------------------------------------------------------------------------------

CHUNKED = Shape(page_size=4, num_pages=20, max_rows=2, chunk_align=2, token_budget=6)


@pytest.mark.parametrize("confirmed", [0, 1, 2, 3])
@pytest.mark.parametrize("wanted_from", [1, 5, 14])
def test_prompt_logprobs_are_sent_once_although_the_worker_is_lost(confirmed: int, wanted_from: int) -> None:
    world = World(CHUNKED)
    world.submit(prompt(15), max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=wanted_from, num_logprobs=TWO_BEST)
    world.steps(confirmed)
    world.tick()
    world.restart()
    world.finish()
    # Each step computes six positions. Logprobs from confirmed steps are not wanted again.
    following = max(wanted_from, 6 * confirmed + 1)
    assert starts_of(world) == [(1, wanted_from), (1, following if following < 15 else 0)]
    assert sum(count for _, count in pieces_of(world)) == 15 - wanted_from


def test_prompt_logprobs_are_sent_once_although_a_step_fails() -> None:
    world = World(CHUNKED, faults=Faults(fail_steps=frozenset({2})))
    world.submit(prompt(15), max_new_tokens=3, ignore_eos=True, prompt_logprobs_from=1)
    world.finish()
    assert starts_of(world) == [(1, 1), (1, 7)]
    assert pieces_of(world) == [(1, 6), (7, 6), (13, 2)]


def test_a_preempted_prompt_gets_its_pending_logprobs_and_resumes_after_them() -> None:
    shape = Shape(page_size=4, num_pages=6, max_rows=2, chunk_align=2, token_budget=7)
    world = World(shape, greedy(plans_in_flight=3))
    world.submit([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    world.submit(prompt(15), max_new_tokens=2, ignore_eos=True, prompt_logprobs_from=2, num_logprobs=TWO_BEST)
    world.tick()
    # In the third plan the first request takes one of the second one's four pages.
    assert [chunks(plan) for plan in world.sent] == [[(1, 0, 3), (2, 0, 2)], [(2, 2, 6)], []]
    [victim] = world.core.queue.by_request_id("r2")
    assert (victim.row, victim.pending_plans, victim.pending_tokens) == (0, 2, 0)
    while world.apply() | world.deliver():
        pass
    assert pieces_of(world, 2) == [(2, 1), (3, 6)]
    assert victim.prompt_logprobs_from == 9
    world.finish()
    assert [wanted for _, wanted in starts_of(world)] == [0, 2, 9]
    assert sum(count for _, count in pieces_of(world, 2)) == 13


def test_a_request_is_admitted_again_after_its_last_prompt_logprobs_were_pending() -> None:
    """After them the waiting request wants no more prompt logprobs, and is admitted."""
    shape = Shape(page_size=4, num_pages=4, max_rows=2, chunk_align=1, token_budget=12)
    world = World(shape, greedy(plans_in_flight=3))
    world.submit([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    world.submit(prompt(8), max_new_tokens=2, ignore_eos=True, prompt_logprobs_from=1)
    world.tick()
    [victim] = world.core.queue.by_request_id("r2")
    assert (victim.row, victim.pending_tokens, victim.prompt_logprobs_from) == (0, 1, 1)
    assert world.core.queue.head() is victim
    world.finish()
    assert pieces_of(world, 2) == [(1, 7)]
    assert [wanted for _, wanted in starts_of(world)] == [0, 1, 0]


def test_nonfinite_prompt_logprobs_end_the_request_before_its_first_token() -> None:
    world = World(CHUNKED, faults=Faults(nonfinite_token=280))
    doomed = world.submit([*prompt(8), 280, *prompt(6)], prompt_logprobs_from=1, num_logprobs=TWO_BEST)
    other = world.submit(prompt(4), max_new_tokens=4, ignore_eos=True, num_logprobs=TWO_BEST)
    world.settle()
    world.fault(doomed)
    assert pieces_of(world, doomed) == [(1, 6)], "the first chunk is finite, the second is not"
    assert len(world.streams[other].tokens) == 4


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_a_request_without_its_prompt_logprobs_fails_although_its_token_is_valid(max_new_tokens: int) -> None:
    world = World()
    stream = world.submit(prompt(5), max_new_tokens=max_new_tokens, ignore_eos=True, prompt_logprobs_from=1)
    world.tick()
    world.apply()
    world.results[0].prompt_logprobs.logprobs = np.array([-1, np.nan, -1, -1], "<f4").tobytes()
    world.deliver()
    world.fault(stream)
    world.check_empty()


def test_each_piece_has_the_number_of_alternatives_of_its_request() -> None:
    world = World(Shape(token_budget=64, spare_logit_rows=64))
    for salt, num_logprobs in enumerate([6, 1, 0, 3]):
        asked = {"num_logprobs": num_logprobs, "prompt_logprobs_from": 1}
        world.submit(prompt(5, salt), max_new_tokens=2, ignore_eos=True, **asked)
    world.finish()
    [output] = [each for each in world.told(fx.StepOutput) if each.prompt_logprobs]
    assert [piece.values.top_token_ids.shape for piece in output.prompt_logprobs] == [(4, 5), (4, 0), (4, 0), (4, 2)]


def test_logprobs_of_ended_requests_are_dropped() -> None:
    """Both lists of the result begin with entries of the first request, which was cancelled meanwhile."""
    world = World(Shape(token_budget=64, spare_logit_rows=64))
    for salt in range(3):
        world.submit(
            prompt(5, salt), max_new_tokens=3, ignore_eos=True, num_logprobs=TWO_BEST, prompt_logprobs_from=1 + salt
        )
    world.tick()
    assert len(world.sent[0].chunk_rows) == 3
    world.cancel(1)
    world.settle()
    assert [len(stream.logprobs) for stream in world.streams.values()] == [0, 3, 3]
    assert [len(stream.prompt_logprobs) for stream in world.streams.values()] == [0, 3, 2]


# Outputs -----------------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_if_no_row_wants_logprobs(world: World) -> None:
    world.submit(prompt(3), presence_penalty=1.0)
    world.tick()
    record = world.lane.in_flight[0]
    assert (record.num_logprobs, record.wanted_prompt_logprobs) == (None, ())
    assert world.lane.rows.num_with_logprobs == 0


def test_each_front_end_gets_its_own_logprobs() -> None:
    world = World(config=ONE)
    world.submit(prompt(3), max_new_tokens=1, num_logprobs=TWO_BEST, ignore_eos=True, prompt_logprobs_from=1)
    submit = world.streams[1].submit
    fields = {name: getattr(submit, name) for name in submit.__slots__}
    world.core.handle(ev.FrontendJoined(frontend="f-2"), 0.0)
    for stream, num_logprobs in ((1, 0), (7, 2)):
        changed = {"frontend": "f-2", "stream": stream, "request_id": f"other-{stream}", "num_logprobs": num_logprobs}
        world.core.handle(ev.Submit(**fields | changed), 0.0)
    world.tick()
    world.apply()
    event = worker_wire.event_of(pb.WorkerToCore(result=world.results[0]), world.worker)
    outputs = {e.frontend: e for e in world.core.handle(event, 0.0) if isinstance(e, fx.StepOutput)}
    mine, others = outputs[FRONTEND], outputs["f-2"]
    assert mine.logprobs is not None and others.logprobs is not None
    assert (mine.logprobs.entries.tolist(), others.logprobs.entries.tolist()) == ([0], [1])
    assert (mine.streams.tolist(), others.streams.tolist()) == ([1], [1, 7])
    assert [[end.stream for end in output.ends] for output in (mine, others)] == [[1], [1, 7]]
    # All three have the same prompt, so the same logprob.
    assert mine.logprobs.values.logprobs.tolist() == others.logprobs.values.logprobs.tolist()
    assert [(piece.frontend, piece.stream) for output in (mine, others) for piece in output.prompt_logprobs] == [
        (FRONTEND, 1),
        ("f-2", 1),
        ("f-2", 7),
    ]


def test_pending_tokens_come_with_logprobs_until_the_request_is_cancelled() -> None:
    world = World(Shape(page_size=4, num_pages=3, max_rows=2), greedy(plans_in_flight=3))
    world.submit([1, 2, 3], max_new_tokens=6, ignore_eos=True, num_logprobs=5)
    world.submit([4, 5, 6], max_new_tokens=4, ignore_eos=True, num_logprobs=TWO_BEST)
    world.tick()
    [victim] = world.core.queue.by_request_id("r2")
    assert (victim.row, victim.pending_tokens) == (0, 2)
    world.work()
    assert len(world.streams[2].logprobs) == 1
    world.check_content()
    world.cancel(2)
    world.settle()
    assert (len(world.streams[1].logprobs), len(world.streams[2].logprobs)) == (6, 1)
