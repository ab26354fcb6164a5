"""The executor equals the oracle on right plans and notices every kind of wrong one."""

from collections.abc import Callable

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.rigs.hashing import ROOT, extend, extend_array, mix, mix_array
from tests.rigs.oracle import Reason, complete
from tests.rigs.plan_builder import PlanBuilder, int32
from tests.rigs.row_tables import table_checksum
from tests.rigs.sampling import Settings

SHAPE = Shape(page_size=4, num_pages=16, max_rows=4, max_length=40, token_budget=16)
PROMPT = [7, 1, 2, 3, 4, 5]


def tokens_of(result: pb.StepResult) -> list[int]:
    return np.frombuffer(result.tokens, dtype="<i4").tolist()


def expected(prompt: list[int], num: int, **settings: object) -> list[int]:
    completion = complete(
        prompt, max_new_tokens=num, vocab=SHAPE.sampled_vocab, ignore_eos=True, settings=Settings(**settings)
    )
    return list(completion.tokens)


def ok(result: pb.StepResult) -> list[int]:
    assert result.status == pb.STEP_STATUS_OK, result.detail
    return tokens_of(result)


def test_the_hashes_of_arrays_and_numbers_agree() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 12345]
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]
    tokens = np.array([0, 5, 287, 2**31 - 1, 9], dtype=np.int32)
    assert extend_array(np.array(values, dtype=np.uint64), tokens).tolist() == [
        extend(value, token) for value, token in zip(values, tokens.tolist(), strict=True)
    ]
    # splitmix64's first outputs from seed 0, as published.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_the_oracle_depends_on_each_of_its_arguments() -> None:
    base = expected(PROMPT, 8)
    assert base == expected(PROMPT, 8, seed=9)  # greedy
    sampled = expected(PROMPT, 8, temperature=0.5, seed=9)
    others = [
        expected([7, 1, 2, 3, 5, 4], 8),
        sampled,
        expected(PROMPT, 8, temperature=0.5, seed=10),
        expected(PROMPT, 8, temperature=0.5, seed=9, sample_idx=1),
    ]
    assert len({tuple(tokens) for tokens in [base, *others]}) == 5
    stop = base[3]
    first = base.index(stop)
    stopped = complete(PROMPT, max_new_tokens=8, vocab=SHAPE.sampled_vocab, stop_token_ids=[stop])
    assert (list(stopped.tokens), stopped.reason) == (base[: first + 1], Reason.STOP_TOKEN)
    late = complete(PROMPT, max_new_tokens=8, vocab=SHAPE.sampled_vocab, stop_token_ids=[stop], min_new_tokens=6)
    assert stop not in late.tokens[:6]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 2**64 - 1}])
def test_chunks_then_decode_equal_the_oracle(chunk: int, settings: dict) -> None:
    executor, plans, out = Executor(SHAPE), PlanBuilder(), []
    pages = [9, 2, 5, 1]
    plans.start(3, PROMPT, pages[:2], **settings)
    for start in range(0, len(PROMPT), chunk):
        count = min(chunk, len(PROMPT) - start)
        plans.chunk(3, start, count, samples=start + count == len(PROMPT))
        out += ok(executor.apply(plans.build()))
    for position in range(len(PROMPT), len(PROMPT) + 8):
        if position == 8:
            plans.append(3, pages[2])
        if position == 12:
            plans.append(3, pages[3])
        out += ok(executor.apply(plans.decode(3).build()))
    assert out == expected(PROMPT, 9, **settings)
    assert executor.tables == {3: (14, pages)}
    assert executor.violations == []


def test_a_row_resumes_elsewhere_with_the_tokens_it_had() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    want = expected(PROMPT, 6)
    out = ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    out += ok(executor.apply(plans.decode(1).build()))
    other = [50, 60, 70, 80, 90]
    # Another row takes its pages; it comes back on others, a chunk at a time.
    got_other = ok(executor.apply(plans.start(2, other, [2, 1]).chunk(2, 0, 5, samples=True).build()))
    known = PROMPT + out
    executor.apply(plans.start(1, known, [3, 4, 5]).chunk(1, 0, 5, samples=False).decode(2).build())
    out += ok(executor.apply(plans.chunk(1, 5, 3, samples=True).build()))
    for _ in range(3):
        out += ok(executor.apply(plans.decode(1).build()))
    assert out == want
    assert got_other == expected(other, 1)
    assert executor.violations == []


def test_pages_that_came_filled_are_read_and_a_start_may_be_a_decode() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    # Page 1 holds positions 0..3 of the same history.
    prompt = [*PROMPT[:4], 9]
    got = ok(executor.apply(plans.start(2, prompt, [1, 3], first=4).decode(2).build()))
    assert got == expected(prompt, 1)
    # A longer prompt from the same page, in a chunk.
    prompt = [*PROMPT[:4], 8, 8, 8]
    plans.start(3, prompt, [1, 4], first=4).chunk(3, 4, 3, samples=True)
    assert ok(executor.apply(plans.build())) == expected(prompt, 1)


def test_pages_outlive_generations_and_rows_do_not() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder(generation=4)
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    newer = PlanBuilder(generation=5)
    prompt = [*PROMPT[:4], 3]
    assert ok(executor.apply(newer.start(2, prompt, [1, 3], first=4).decode(2).build())) == expected(prompt, 1)
    assert executor.apply(plans.decode(1).build()).status == pb.STEP_STATUS_SKIPPED
    assert executor.violations == []
    result = executor.apply(newer.decode(1).build())
    assert result.status == pb.STEP_STATUS_FAILED
    assert "row 1 was never started" in result.detail


def test_banned_tokens_are_not_drawn_before_their_position() -> None:
    free = expected(PROMPT, 4)
    executor, plans = Executor(SHAPE), PlanBuilder()
    plans.start(1, PROMPT, [1, 2, 3], banned=free[:1], banned_until=8).chunk(1, 0, 6, samples=True)
    out = ok(executor.apply(plans.build()))
    for _ in range(3):
        out += ok(executor.apply(plans.decode(1).build()))
    want = complete(PROMPT, max_new_tokens=4, vocab=SHAPE.sampled_vocab, stop_token_ids=free[:1], min_new_tokens=2)
    assert out[: len(want.tokens)] == list(want.tokens)
    assert out[0] != free[0]


def test_the_kept_checksum_is_the_defined_one() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(4, [1], [15]).chunk(4, 0, 1, samples=True).build()))
    # Written out from worker.proto.
    want = 1 * (mix((4 << 40) ^ 0xFFFFF) | 1) + mix((4 << 40) ^ (0 << 20) ^ 15)
    assert table_checksum(executor.tables) == want % 2**64


# Wrong plans: what is built upon a good first step, and what the violation says.
def _two_rows(plans: PlanBuilder) -> None:
    plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True)
    plans.start(2, [9, 9, 9], [3]).chunk(2, 0, 3, samples=True)


def _patched(**fields: bytes) -> Callable[[PlanBuilder], pb.StepPlan]:
    def build(plans: PlanBuilder) -> pb.StepPlan:
        plan = plans.start(3, [1, 2], [6]).chunk(3, 0, 2, samples=True).build()
        for name, value in fields.items():
            part, _, leaf = name.partition("__")
            setattr(getattr(plan, part), leaf, value)
        return plan

    return build


def _edited(**fields: int) -> Callable[[PlanBuilder], pb.StepPlan]:
    def build(plans: PlanBuilder) -> pb.StepPlan:
        plan = plans.decode(1).build()
        for name, change in fields.items():
            setattr(plan, name, getattr(plan, name) + change)
        return plan

    return build


WRONG = [
    ("given page 0", lambda p: p.start(3, [1], [0]).chunk(3, 0, 1, samples=True).build()),
    ("given page 16, outside", lambda p: p.start(3, [1], [16]).chunk(3, 0, 1, samples=True).build()),
    ("given page -1, outside", lambda p: p.start(3, [1], [-1]).chunk(3, 0, 1, samples=True).build()),
    ("page 7 twice", lambda p: p.start(3, [1], [7, 7]).chunk(3, 0, 1, samples=True).build()),
    ("page 2 twice", lambda p: p.append(1, 2).decode(1).build()),
    ("belongs to row 3", lambda p: p.start(3, [1], [2]).chunk(3, 0, 1, samples=True).decode(1).build()),
    ("belongs to row 2", lambda p: p.append(2, 2).decode(1).build()),
    ("a chunk starts at 2", lambda p: p.start(3, [1] * 4, [7]).chunk(3, 2, 2, samples=True).build()),
    ("next position is 6", lambda p: p.chunk(1, 5, 1, samples=True).build()),
    ("ends at 5, 4 tokens", lambda p: p.start(3, [1] * 4, [7, 8]).chunk(3, 0, 5, samples=True).build()),
    ("chunk of 0", lambda p: p.start(3, [1], [7]).chunk(3, 0, 0, samples=False).decode(1).build()),
    ("samples=True", lambda p: p.start(3, [1] * 4, [7]).chunk(3, 0, 3, samples=True).build()),
    ("samples=False", lambda p: p.start(3, [1] * 4, [7]).chunk(3, 0, 4, samples=False).build()),
    ("decodes position 0", lambda p: p.start(3, [1] * 4, [7]).decode(3).build()),
    ("never started", lambda p: p.decode(4).build()),
    ("never started", lambda p: p.append(4, 9).decode(1).build()),
    ("outside 1 … 4", lambda p: p.start(5, [1], [7]).chunk(5, 0, 1, samples=True).build()),
    ("outside 1 … 4", lambda p: p.start(0, [1], [7]).chunk(0, 0, 1, samples=True).build()),
    ("runs twice", lambda p: p.decode(1, 1).build()),
    ("started twice", lambda p: p.start(3, [1], [7]).start(3, [1], [7]).decode(3).build()),
    ("with 1 pages", lambda p: p.start(3, [1] * 5, [7]).chunk(3, 0, 5, samples=True).build()),
    ("beyond its pages", lambda p: p.start(3, [1] * 6, [1], first=5).decode(3).build()),
    ("starts at 1 with 1", lambda p: p.start(3, [1], [1], first=1).decode(3).build()),
    ("position 0 on page 8", lambda p: p.start(3, [1] * 5, [8, 9], first=4).decode(3).build()),
    ("position 3 on page 1", lambda p: p.start(3, [7, 1, 2, 2, 2], [1, 9], first=4).decode(3).build()),
    ("a budget of 16", lambda p: p.start(3, [1] * 17, [5, 6, 7, 8, 9]).chunk(3, 0, 17, samples=True).build()),
    ("runs nothing", lambda p: p.build()),
    ("outside 0 … 287", lambda p: p.start(3, [288], [7]).chunk(3, 0, 1, samples=True).build()),
    ("outside 0 … 287", lambda p: p.start(3, [-1], [7]).chunk(3, 0, 1, samples=True).build()),
    (
        "starts with 41",
        lambda p: p.start(3, [1] * 41, list(range(4, 15))).chunk(3, 0, 9, samples=False).build(),
    ),
    ("bans a token", lambda p: p.start(3, [1], [7], banned=[288]).chunk(3, 0, 1, samples=True).build()),
    ("page 0 is to be zeroed", lambda p: p.zero(0).decode(1).build()),
    ("position 0 on page 1", lambda p: p.zero(1).decode(1).build()),
    ("no multiple of 4", _patched(started__tokens=b"\0\0\0\0\0\0\0")),
    ("0 entries where 1", _patched(started__seed=b"")),
    ("3 entries where 2", _patched(started__tokens=int32([1, 2, 3]))),
    ("a count is -1", _patched(started__num_pages=int32([-1]))),
    ("2 entries where 1", _patched(chunks__starts=int32([0, 1]))),
    ("step 3 came", _edited(step=1)),
    ("step 1 came", _edited(step=-1)),
    ("checksum", _edited(checksum=-1)),
]


@pytest.mark.parametrize(("text", "wrong"), WRONG, ids=[f"{i}-{text}" for i, (text, _) in enumerate(WRONG)])
def test_a_wrong_plan_is_noticed(text: str, wrong: Callable[[PlanBuilder], pb.StepPlan]) -> None:
    heard: list[str] = []
    executor, plans = Executor(SHAPE, on_violation=heard.append), PlanBuilder()
    _two_rows(plans)
    ok(executor.apply(plans.build()))
    result = executor.apply(wrong(plans))
    assert result.status in (pb.STEP_STATUS_FAILED, pb.STEP_STATUS_OUT_OF_SYNC)
    assert text in result.detail
    assert heard == executor.violations
    assert len(heard) == 1
    assert result.tokens == b""
    assert executor.apply(plans.decode(2).build()).status == pb.STEP_STATUS_SKIPPED
    assert len(executor.violations) == 1


def test_a_page_overwritten_by_its_next_owner_is_noticed_by_a_reader() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    _two_rows(plans)
    ok(executor.apply(plans.build()))
    # Page 1 is row 1's first; row 1 goes on writing page 2, its own.
    ok(executor.apply(plans.start(3, [5, 5], [1]).chunk(3, 0, 2, samples=True).build()))
    result = executor.apply(plans.decode(1).build())
    assert result.status == pb.STEP_STATUS_FAILED
    assert "position 0 on page 1 reads back token 5" in result.detail


def test_a_page_that_came_filled_to_another_row_is_not_written_again() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT[:4], [1]).chunk(1, 0, 4, samples=True).build()))
    executor.apply(plans.start(2, [*PROMPT[:4], 9], [1, 3], first=4).decode(2).build())
    result = executor.apply(plans.start(3, PROMPT[:4], [1], first=3).decode(3).build())
    # Row 3 was given page 1 anew, which unseals it; row 2 still reads it and finds it unchanged.
    assert ok(result) == expected(PROMPT[:4], 1)
    # The first owner writing on, which it may not: its page was sealed.
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT[:4], [1, 4]).chunk(1, 0, 2, samples=False).build()))
    ok(executor.apply(plans.chunk(1, 2, 2, samples=True).build()))
    executor.apply(plans.start(2, [*PROMPT[:4], 9], [1, 3], first=4).decode(2).build())
    assert executor.violations == []
    executor._tables.row(1).position = 3
    executor._tables.row(1).num_tokens = 4
    result = executor.apply(PlanBuilderAt(plans, 1, 3).decode(1).build())
    assert "which came filled to another row" in result.detail


def PlanBuilderAt(plans: PlanBuilder, row: int, position: int) -> PlanBuilder:
    """The same plans with the sender's copy of a row's position moved, to agree with a doctored executor."""
    plans._tables[row] = (position, plans._tables[row][1])
    return plans


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(fail_steps=frozenset({2})), pb.STEP_STATUS_FAILED),
        (Faults(oom_steps=frozenset({2})), pb.STEP_STATUS_OUT_OF_MEMORY),
        (Faults(out_of_sync_steps=frozenset({2})), pb.STEP_STATUS_OUT_OF_SYNC),
    ],
)
def test_ordered_faults_are_answered_and_are_no_violations(faults: Faults, status: int) -> None:
    executor, plans = Executor(SHAPE, faults=faults), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    assert executor.apply(plans.decode(1).build()).status == status
    assert executor.apply(plans.decode(1).build()).status == pb.STEP_STATUS_SKIPPED
    newer = PlanBuilder(generation=2)
    ok(executor.apply(newer.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    assert executor.violations == []


def test_a_step_with_the_failing_token_fails_and_others_do_not() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(fail_token=281)), PlanBuilder()
    ok(executor.apply(plans.start(1, [1, 2], [1]).chunk(1, 0, 2, samples=True).build()))
    plans.start(2, [1, 281, 3], [2]).chunk(2, 0, 1, samples=False)
    ok(executor.apply(plans.decode(1).build()))
    assert executor.apply(plans.chunk(2, 1, 1, samples=False).build()).status == pb.STEP_STATUS_FAILED
    assert executor.violations == []


def test_a_row_behind_the_poison_is_not_finite_and_its_neighbour_is() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    plans.start(1, [1, 2], [1]).chunk(1, 0, 2, samples=True)
    plans.start(2, [1, 280], [2]).chunk(2, 0, 2, samples=True)
    result = executor.apply(plans.build())
    assert np.frombuffer(result.nonfinite, dtype="<i4").tolist() == [1]
    assert tokens_of(result) == [expected([1, 2], 1)[0], -1]
    # Its pages are nobody's until they are zeroed, and what it still computes is not finite either.
    later = executor.apply(plans.decode(1, 2).build())
    assert np.frombuffer(later.nonfinite, dtype="<i4").tolist() == [1]
    plans.zero(2).start(3, [5, 5], [2]).chunk(3, 0, 2, samples=True)
    assert ok(executor.apply(plans.build())) == expected([5, 5], 1)
    assert executor.violations == []


@pytest.mark.parametrize("appended", [False, True])
def test_a_page_that_is_not_finite_may_not_be_given_out(appended: bool) -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    executor.apply(plans.start(1, [280], [2]).chunk(1, 0, 1, samples=True).build())
    plans.start(3, [5, 5], [3] if appended else [2]).chunk(3, 0, 2, samples=True)
    if appended:
        plans.append(3, 2)
    result = executor.apply(plans.build())
    assert "row 3 was given page 2, which holds values that are not finite" in result.detail


@pytest.mark.parametrize(("page", "tainted"), [(1, False), (2, True), (3, True), (4, False)])
def test_what_a_finite_sample_has_read_stays_finite(page: int, tainted: bool) -> None:
    first, second = expected([6] * 5, 2)
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=second)), PlanBuilder()
    executor.apply(plans.start(1, [6] * 5, [1, 2, 3]).chunk(1, 0, 5, samples=True).build())
    assert ok(executor.apply(plans.decode(1).build())) == [second]
    # Positions 6 and 7 fill page 2, whose first half was read by finite samples; 8 and 9 go to page 3.
    for _ in range(4):
        assert tokens_of(executor.apply(plans.decode(1).build())) == [-1]
    result = executor.apply(plans.start(2, [first], [page]).decode(2).build())
    assert ("not finite" in result.detail) == tainted


def test_a_chunk_that_does_not_sample_taints_its_pages_too() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    ok(executor.apply(plans.start(1, [280, *PROMPT], [1, 2]).chunk(1, 0, 2, samples=False).build()))
    result = executor.apply(plans.start(2, [5], [1]).decode(2).build())
    assert "row 2 was given page 1, which holds values that are not finite" in result.detail


def test_the_empty_history_is_the_root() -> None:
    want = complete([5], max_new_tokens=1, vocab=SHAPE.sampled_vocab).tokens[0]
    assert mix(extend(ROOT, 5)) % SHAPE.sampled_vocab == want
