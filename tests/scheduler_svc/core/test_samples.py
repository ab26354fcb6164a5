"""Requests with several samples: all are admitted or none, then each runs and ends by itself."""

from dataclasses import asdict

import pytest

from scheduler_svc.core.messages import effects as fx
from scheduler_svc.core.messages import events as ev
from tests.rigs.executor import Shape
from tests.rigs.sampling import MINUS_INFINITY, Settings
from tests.scheduler_svc.core.world import FRONTEND, World, greedy

PROMPT = [1, 2, 3]


def started(world: World) -> list[tuple[int, int]]:
    """(row, sample) of every row started, in order."""
    return [(start.row, start.sample_idx) for plan in world.sent for start in plan.starts]


def test_a_request_is_admitted_once_and_each_sample_gets_a_row_and_an_end(world: World) -> None:
    stream = world.submit(PROMPT, num_samples=3, max_new_tokens=5, temperature=1.0, seed=4, ignore_eos=True)
    admitted = world.told(fx.Admitted)
    assert admitted == [fx.Admitted(frontend=FRONTEND, stream=stream, requests_ahead=0)]
    world.finish()
    assert started(world) == [(1, 0), (2, 1), (3, 2)]
    tokens = [tuple(world.streams[number].tokens) for number in range(stream, stream + 3)]
    assert len(set(tokens)) == 3, "the random numbers depend on the sample"
    assert [world.end(number).stats.output_tokens for number in range(stream, stream + 3)] == [5, 5, 5]


def test_samples_share_the_prompt(world: World) -> None:
    world.submit(PROMPT, num_samples=3)
    samples = world.core.queue.by_request_id("r1")
    assert [sample.sample_idx for sample in samples] == [0, 1, 2]
    assert all(sample.submit is samples[0].submit for sample in samples)
    assert len({sample.handle for sample in samples}) == 3


def test_samples_keep_no_bytes_that_are_kept_and_freed_elsewhere(world: World) -> None:
    stream = world.submit(list(range(9)), num_samples=2, constraint=b"a toy, toy_complete=6", linger_seconds=60.0)
    submitted, kept = world.streams[stream].submit, world.core.queue.by_request_id("r1")[0].submit
    bulk = ("page_hashes", "description")
    assert all(getattr(submitted, name) for name in bulk) and submitted.resources[0].source
    assert not any(getattr(kept, name) for name in bulk) and not kept.resources[0].source
    assert kept.options == submitted.options
    assert kept.prompt is submitted.prompt


def test_samples_that_do_not_fit_wait_and_count_as_requests_ahead() -> None:
    world = World(Shape(max_rows=2))
    world.submit(PROMPT, num_samples=3, max_new_tokens=3, ignore_eos=True)
    world.tick()
    assert (world.core.queue.num_waiting, world.core.queue.waiting_tokens) == (1, 3)
    world.submit(PROMPT, max_new_tokens=3, ignore_eos=True)
    assert isinstance(world.effects[-1], fx.Admitted)
    assert world.effects[-1].requests_ahead == 1
    world.finish()


BOUNDED = greedy(max_waiting=6, max_waiting_tokens=20)


@pytest.mark.parametrize(
    ("prompt", "num_samples", "field", "sentence"),
    [
        ([1], 7, "sampling.num_samples", "num_samples is 7; the limit is 6"),
        ([1] * 5, 5, "sampling.num_samples", "num_samples is 5 and the prompt has 5 tokens, 25 together; "
            "at most 20 tokens may wait (max_waiting_tokens)"),
        ([1] * 21, 1, "token_ids", "the prompt has 21 tokens; at most 20 tokens may wait (max_waiting_tokens)"),
        ([0, 288], 1, "token_ids", "a token id is outside 0 to 287"),
    ],
    ids=["samples", "tokens of all samples", "prompt", "token outside the vocabulary"],
)  # fmt: skip
def test_what_the_queue_or_the_model_can_never_take_is_invalid(
    prompt: list[int], num_samples: int, field: str, sentence: str
) -> None:
    world = World(config=BOUNDED)
    rejected = world.refusal(world.submit(prompt, num_samples=num_samples))
    assert (rejected.code, rejected.field, rejected.message) == (fx.RejectCode.INVALID, field, sentence)


def test_a_request_may_have_at_most_sixty_four_samples() -> None:
    world = World(config=greedy(max_waiting=1000))
    assert world.refusal(world.submit([1], num_samples=65)).message == "num_samples is 65; the limit is 64"
    world.submit([1], num_samples=64, max_new_tokens=2, ignore_eos=True)
    world.run()
    assert len([stream for stream in world.streams.values() if stream.end]) == 64


def test_a_queue_with_room_for_some_samples_rejects_all() -> None:
    world = World(config=BOUNDED)
    world.submit([1], num_samples=4)
    rejected = world.refusal(world.submit([1], num_samples=3))
    assert (rejected.code, rejected.message) == (
        fx.RejectCode.QUEUE_FULL,
        "4 requests are waiting and num_samples is 3; the limit is 6",
    )
    rejected = world.refusal(world.submit([1] * 9, num_samples=2))
    assert rejected.message == "4 tokens are waiting and the prompt has 9 for each of 2 samples; the limit is 20"
    assert (len(world.core.queue), world.core.queue.num_waiting) == (4, 4)
    world.submit([1] * 8, num_samples=2)
    assert (world.core.queue.num_waiting, world.core.queue.waiting_tokens) == (6, 20)


@pytest.mark.parametrize(("stream", "num_samples"), [(4, 1), (2, 2), (1, 8), (5, 1), (3, 1)])
def test_a_request_with_any_stream_in_use_is_rejected(world: World, stream: int, num_samples: int) -> None:
    world.submit(PROMPT, num_samples=3)  # streams 1 to 3
    submit = world.streams[1].submit
    fields = {name: getattr(submit, name) for name in submit.__slots__}
    fields |= {"stream": stream, "num_samples": num_samples, "request_id": "other"}
    [answer] = world.core.handle(ev.Submit(**fields), 0.0)
    if stream > 3:
        assert isinstance(answer, fx.Admitted)
    else:
        assert isinstance(answer, fx.Rejected)
        assert answer.code is fx.RejectCode.DUPLICATE
        assert len(world.core.queue) == 3


def test_a_request_id_is_free_when_its_last_sample_has_ended(world: World) -> None:
    world.submit(PROMPT, num_samples=2, request_id="same")
    world.cancel(1)
    assert world.refusal(world.submit(PROMPT, request_id="same")).code is fx.RejectCode.DUPLICATE
    world.cancel(2)
    again = world.submit(PROMPT, request_id="same")
    assert world.streams[again].admitted


def test_abort_ends_all_samples_with_one_outcome() -> None:
    world = World(Shape(max_rows=2))
    world.submit(PROMPT, num_samples=3, max_new_tokens=50, ignore_eos=True)
    world.step()
    # The first sample is cancelled, the second runs, the third waits.
    world.cancel(1)
    effects = world.handle(ev.Abort(frontend=FRONTEND, query=5, request_ids=("r1", "r1")))
    assert [effect for effect in effects if isinstance(effect, fx.AbortReply)] == [
        fx.AbortReply(frontend=FRONTEND, query=5, outcomes=(("r1", True), ("r1", False)))
    ]
    assert [world.end(number).reason for number in (2, 3)] == [fx.EndReason.ABORTED] * 2
    assert world.streams[1].end is None
    world.run()
    world.check_empty()


def test_time_limits_and_deadlines_apply_to_each_sample() -> None:
    world = World(Shape(max_rows=1))
    world.submit(PROMPT, num_samples=3, max_new_tokens=50, ignore_eos=True, max_time_seconds=2.0)
    world.submit(PROMPT, num_samples=2, deadline_seconds=1.0)
    world.step()
    assert world.core.next_wake() == pytest.approx(1.0)
    world.tick(1.0)
    failures = [world.end(number).failure for number in (4, 5)]
    assert [failure and failure.code for failure in failures] == [fx.FailureCode.DEADLINE] * 2
    world.tick(1.0)
    assert [world.end(number).reason for number in (1, 2, 3)] == [fx.EndReason.TIME_LIMIT] * 3
    assert started(world) == [(1, 0)], "what is over is not planned"


# The settings of each sample ---------------------------------------------------------------------------------------


def test_a_plan_contains_all_settings_of_a_row(world: World) -> None:
    asked = Settings(presence_penalty=0.5, biases=((3, 1.5), (4, MINUS_INFINITY)))
    world.submit(PROMPT, num_samples=2, num_logprobs=3, prompt_logprobs_from=2, **asdict(asked))
    world.run()
    starts = [start for plan in world.sent for start in plan.starts]
    assert [start.sampling for start in starts] == [asked.encoded()] * 2
    assert [start.sample_idx for start in starts] == [0, 1]
    assert [start.num_logprobs for start in starts] == [3, 3]
    assert [start.prompt_logprobs_from for start in starts] == [2, 0]
    assert [start.num_prompt_tokens for start in starts] == [3, 3]
    world.check_all_ended()
