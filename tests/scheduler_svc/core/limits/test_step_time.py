"""Predicted step times: never too small after cheap steps, close after many, and the deadline that follows."""

import numpy as np
import pytest

from scheduler_svc.core.messages.plan import SentPlan
from scheduler_svc.core.state.step_clock import StepTimes, deadline_seconds
from tests.rigs.shape import Shape
from tests.scheduler_svc.core.world import info_of

# A model on a CPU: a prompt token takes 1 ms, a row of decode 20 ms for all weights.
SHAPE = Shape(page_size=16, num_pages=64, max_rows=256, max_length=40_000, token_budget=2048, token_us=1000.0)
BASE, TOKEN, CONTEXT = 0.020, 0.001, 1e-6


def sent(*, prompt: int = 0, at: int = 0, rows: int = 0, context: int = 0, moved: int = 0) -> SentPlan:
    """A plan of one chunk of `prompt` positions from `at` on, and `rows` decode rows at position `context`."""
    ends = [at + prompt] * (prompt > 0) + [context + 1] * rows
    count = len(ends)
    return SentPlan(
        step=1, sent_at=0.0, rows=np.arange(count), index=slice(count), handles=np.arange(count),
        ends=np.array(ends, np.int32), sampled=np.arange(count), prefill_tokens=prompt, decode_tokens=rows,
        num_logprobs=None, wanted_prompt_logprobs=(), cached=(), swapped_out=(), moved_pages=moved,
    )  # fmt: skip


def true_seconds(plan: SentPlan) -> float:
    """The time of the step on the pretend machine: weights once, then each position and what it reads."""
    counts = [plan.prefill_tokens] * (len(plan.ends) > plan.decode_tokens) + [1] * plan.decode_tokens
    read = sum(count * end for count, end in zip(counts, plan.ends.tolist(), strict=True))
    return BASE + TOKEN * sum(counts) + CONTEXT * read


def predicted(times: StepTimes, plan: SentPlan) -> float:
    return times.predict(plan, times.work(plan))


def learn(times: StepTimes, plan: SentPlan, seconds: float) -> None:
    times.learn(plan, times.work(plan), seconds)


CHEAP = [sent(rows=1, context=5), sent(rows=2, context=9), sent(prompt=1), sent(prompt=8)]
COSTLY = [
    sent(prompt=2048), sent(prompt=2048, at=30_000), sent(rows=256, context=10), sent(rows=256, context=30_000),
    sent(prompt=1792, at=2000, rows=256, context=8000),
]  # fmt: skip


@pytest.mark.parametrize("cheap", CHEAP)
@pytest.mark.parametrize("costly", COSTLY)
def test_cheap_steps_before_never_make_a_costly_step_too_small(cheap: SentPlan, costly: SentPlan) -> None:
    times = StepTimes(info_of(SHAPE))
    for _ in range(1000):
        learn(times, cheap, true_seconds(cheap))
    assert predicted(times, costly) >= true_seconds(costly) / 2


@pytest.mark.parametrize("token_us", [0.0, 1000.0])
@pytest.mark.parametrize("plan", [*CHEAP, *COSTLY])
def test_a_known_kind_of_step_is_predicted_closely(plan: SentPlan, token_us: float) -> None:
    times = StepTimes(info_of(Shape(page_size=16, num_pages=64, max_length=40_000, token_us=token_us)))
    for other in (*CHEAP, *COSTLY):
        learn(times, other, true_seconds(other))
    for _ in range(50):
        learn(times, plan, true_seconds(plan))
    assert true_seconds(plan) / 2 <= predicted(times, plan) <= 2 * true_seconds(plan)


def test_the_first_step_includes_the_zeroing_of_the_pool() -> None:
    small, large = (StepTimes(info_of(Shape(num_pages=pages, token_us=100.0))) for pages in (64, 1 << 20))
    assert predicted(small, sent(rows=1)) == 0.5
    # 4 Mi positions; zeroing one costs a 128th of 100 us.
    assert predicted(large, sent(rows=1)) == pytest.approx((1 << 22) * 100e-6 / 128, rel=0.01)


def test_page_moves_are_part_of_the_work() -> None:
    info = info_of(Shape(token_us=100.0, page_copy_us=250.0))
    assert StepTimes(info).work(sent(rows=1, moved=40)) == pytest.approx(40 * 2.5 + 1, abs=0.1)
    unmeasured = info_of(Shape(page_size=16, token_us=100.0))
    assert StepTimes(unmeasured).work(sent(rows=1, moved=40)) == pytest.approx(40 + 1, abs=0.1)


def test_a_window_limits_the_context_that_is_read() -> None:
    full, windowed = Shape(max_length=40_000), Shape(max_length=40_000, window=512)
    plan = sent(rows=64, context=32_000)
    assert StepTimes(info_of(full)).work(plan) == pytest.approx(64 + 125 * 64, rel=0.01)
    assert StepTimes(info_of(windowed)).work(plan) == 64 + 2 * 64


def test_a_slower_machine_is_followed_at_once_and_a_faster_one_slowly() -> None:
    times, plan = StepTimes(info_of(Shape())), sent(rows=4)
    learn(times, plan, 0.1)
    for _ in range(4):
        learn(times, plan, 1.0)
    assert predicted(times, plan) > 0.7
    learn(times, plan, 0.1)
    assert predicted(times, plan) > 0.65
    for _ in range(100):
        learn(times, plan, 0.1)
    assert predicted(times, plan) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(("predicted", "limit"), [(0.0, 3.0), (0.25, 3.0), (1.0, 9.0), (10.0, 81.0)])
def test_the_deadline_is_eight_times_the_prediction_and_a_second_and_at_least_three_seconds(
    predicted: float, limit: float
) -> None:
    assert deadline_seconds(predicted) == limit
