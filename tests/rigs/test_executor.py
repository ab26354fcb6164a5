"""The executor equals the oracle on right plans and notices every kind of wrong one."""

from collections.abc import Callable
from dataclasses import replace

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


def test_hashes_of_arrays_equal_hashes_of_numbers() -> None:
    values = [0, 1, 2**63, 2**64 - 1, 12345]
    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == [mix(value) for value in values]
    tokens = np.array([0, 5, 287, 2**31 - 1, 9], dtype=np.int32)
    assert extend_array(np.array(values, dtype=np.uint64), tokens).tolist() == [
        extend(value, token) for value, token in zip(values, tokens.tolist(), strict=True)
    ]
    # splitmix64's first outputs from seed 0, as published.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


def test_the_oracle_depends_on_the_prompt_and_ends_at_a_stop_token() -> None:
    base = expected(PROMPT, 8)
    assert base != expected([7, 1, 2, 3, 5, 4], 8)
    stop = base[3]
    first = base.index(stop)
    stopped = complete(PROMPT, max_new_tokens=8, vocab=SHAPE.sampled_vocab, stop_token_ids=[stop])
    assert (list(stopped.tokens), stopped.reason) == (base[: first + 1], Reason.STOP_TOKEN)
    late = complete(PROMPT, max_new_tokens=8, vocab=SHAPE.sampled_vocab, stop_token_ids=[stop], min_new_tokens=6)
    assert stop not in late.tokens[:6]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 2**64 - 1}])
def test_chunks_and_decode_steps_produce_the_tokens_of_the_oracle(chunk: int, settings: dict) -> None:
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


def test_a_row_resumes_on_other_pages_with_its_earlier_tokens() -> None:
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


def test_a_row_reads_shared_pages_and_may_start_as_a_decode_row() -> None:
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


def test_pages_survive_a_new_generation_but_rows_do_not() -> None:
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


def test_the_checksum_equals_the_formula_of_the_proto() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(4, [1], [15]).chunk(4, 0, 1, samples=True).build()))
    # Written out from worker.proto.
    want = 1 * (mix((4 << 40) ^ 0xFFFFF) | 1) + mix((4 << 40) ^ (0 << 20) ^ 15)
    assert table_checksum(executor.tables) == want % 2**64


# Wrong plans: what is built upon a good first step, and what the violation says.
def _two_rows(plans: PlanBuilder) -> None:
    plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True)
    plans.start(2, [9, 9, 9], [3]).chunk(2, 0, 3, samples=True)


def _sharing_in_a_cycle(plans: PlanBuilder) -> PlanBuilder:
    plans.start(1, PROMPT, [1, 2], first=4).start(2, PROMPT, [2, 1], first=4)
    return plans.chunk(1, 4, 2, samples=True).chunk(2, 4, 2, samples=True)


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
    # A hit that ends within a page.
    ("allocated again", lambda p: p.start(3, PROMPT[:4], [1], first=3).chunk(3, 3, 1, samples=True).build()),
    ("allocated again", lambda p: p.start(3, PROMPT[:4], [1], first=2).chunk(3, 2, 2, samples=True).build()),
    # What a row shares is checked though it does not run.
    ("row 3: position 0 on page 9", lambda p: p.start(3, [*PROMPT[:4], 1, 2], [9, 10], first=4).decode(1).build()),
    ("shares pages that wait for its own", lambda p: _sharing_in_a_cycle(p).build()),
    ("not a multiple of 4", _patched(started__tokens=b"\0\0\0\0\0\0\0")),
    ("0 entries where 1", _patched(started__sample_idx=b"")),
    ("3 entries where 2", _patched(started__tokens=int32([1, 2, 3]))),
    ("a count is -1", _patched(started__num_pages=int32([-1]))),
    ("2 entries where 1", _patched(chunks__starts=int32([0, 1]))),
    ("step 3 came", _edited(step=1)),
    ("step 1 came", _edited(step=-1)),
    ("checksum", _edited(checksum=-1)),
]


@pytest.mark.parametrize(("text", "wrong"), WRONG, ids=[f"{i}-{text}" for i, (text, _) in enumerate(WRONG)])
def test_a_wrong_plan_is_a_violation(text: str, wrong: Callable[[PlanBuilder], pb.StepPlan]) -> None:
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


def test_a_row_that_lost_a_page_is_a_violation_when_it_runs() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    _two_rows(plans)
    ok(executor.apply(plans.build()))
    # Page 1 is row 1's first; row 3 gets it and does not write it in full.
    ok(executor.apply(plans.start(3, PROMPT[:4], [1]).chunk(3, 0, 1, samples=False).build()))
    result = executor.apply(plans.decode(1).build())
    assert "row 1 uses page 1, which belongs to row 3 since" in result.detail


def test_a_row_shares_pages_that_a_later_row_computes_in_the_same_plan() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    long, longer = [*PROMPT[:4], 8, 8, 8], [*PROMPT[:4], 8, 8, 8, 8, 9]
    # Rows 1 and 2 stand before the one that writes page 5; row 1 waits for a page of row 2 as well.
    plans.start(1, longer, [5, 6, 7], first=8).start(2, [*long, 8], [5, 6], first=4).start(3, PROMPT, [5, 9])
    plans.chunk(2, 4, 4, samples=True).chunk(3, 0, 6, samples=True).decode(1)
    got = ok(executor.apply(plans.build()))
    assert got == [expected([*long, 8], 1)[0], expected(PROMPT, 1)[0], expected(longer, 1)[0]]
    assert executor.violations == []


def test_a_page_that_a_decode_row_fills_can_be_shared_in_the_same_plan() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    [fourth] = ok(executor.apply(plans.start(1, PROMPT[:3], [1]).chunk(1, 0, 3, samples=True).build()))
    history = [*PROMPT[:3], fourth]
    plans.start(2, [*history, 9], [1, 2], first=4).chunk(2, 4, 1, samples=True).decode(1)
    assert ok(executor.apply(plans.build())) == [expected([*history, 9], 1)[0], expected(PROMPT[:3], 2)[1]]


def test_a_page_can_be_shared_after_its_writer_ended_and_allocated_when_no_row_uses_it() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT[:4], [1]).chunk(1, 0, 4, samples=True).build()))
    # Row 1 ended and its place is another's; page 1 is kept and found twice.
    ok(executor.apply(plans.start(1, [5], [2]).decode(1).build()))
    prompt = [*PROMPT[:4], 6]
    plans.start(2, prompt, [1, 3], first=4).start(3, prompt, [1, 4], first=4).decode(2, 3)
    assert ok(executor.apply(plans.build())) == expected(prompt, 1) * 2
    # Both ended: it is given out and written.
    assert ok(executor.apply(plans.start(4, [8, 8], [1]).chunk(4, 0, 2, samples=True).build())) == expected([8, 8], 1)
    assert executor.violations == []


def test_writing_a_full_page_again_is_a_violation() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT[:4], [1]).chunk(1, 0, 4, samples=True).build()))
    executor._tables.row(1).position = 3
    plans._tables[1] = (3, plans._tables[1][1])
    executor._tables.row(1).num_tokens = 4
    assert "a page that was filled is written again" in executor.apply(plans.decode(1).build()).detail


# Moves ---------------------------------------------------------------------------------------------------------------

HOSTED = replace(SHAPE, host_pages=3)


def _filled(shape: Shape = HOSTED, **faults: int) -> tuple[Executor, PlanBuilder]:
    """Row 1 holds PROMPT on pages 1 and 2."""
    executor, plans = Executor(shape, faults=Faults(**faults)), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    return executor, plans


def test_samples_are_forked_by_copying_part_of_a_page() -> None:
    executor, plans = _filled()
    for row in (2, 3):
        plans.copy(2, row + 1, 1).start(row, PROMPT, [1, row + 1], first=5, temperature=1, sample_idx=row).decode(row)
    got = ok(executor.apply(plans.build()))
    assert got == [expected(PROMPT, 1, temperature=1, sample_idx=row)[0] for row in (2, 3)]
    # All three write on, each on its own page.
    want = [expected(PROMPT, 2, temperature=1, sample_idx=row)[1] for row in (2, 3)]
    assert ok(executor.apply(plans.decode(1, 2, 3).build())) == [expected(PROMPT, 2)[1], *want]
    assert executor.violations == []


def test_pages_saved_to_host_memory_can_be_loaded_into_other_pages() -> None:
    executor, plans = _filled()
    known = [*PROMPT, *expected(PROMPT, 1)]
    # In one plan: saved, given to another row, and written.
    plans.save(1, 0).save(2, 2).start(2, [9] * 5, [2, 1]).chunk(2, 0, 5, samples=True)
    assert ok(executor.apply(plans.build())) == expected([9] * 5, 1)
    plans.load(5, 0).load(3, 2).start(1, known, [5, 3], first=6, num_prompt=6).decode(1, 2)
    assert ok(executor.apply(plans.build())) == [expected(PROMPT, 2)[1], expected([9] * 5, 2)[1]]
    # Saved, zeroed and loaded again in one plan; the host page that was saved first is as it was.
    plans.save(5, 1).zero(5).load(5, 0)
    plans.start(3, known[:5], [5, 6], first=4).decode(3)
    assert ok(executor.apply(plans.build())) == expected(known[:5], 1)
    assert executor.violations == []


def test_loaded_slots_after_the_first_position_are_discarded() -> None:
    executor, plans = _filled()
    plans.save(1, 0).save(2, 1).decode(1)
    ok(executor.apply(plans.build()))
    # From position 5 on it is computed again, over what was saved there.
    plans.load(3, 0).load(4, 1).start(1, PROMPT, [3, 4], first=5).decode(1)
    assert ok(executor.apply(plans.build())) == expected(PROMPT, 1)


def test_host_pages_survive_a_new_generation_but_not_a_new_join() -> None:
    executor, plans = _filled()
    ok(executor.apply(plans.save(1, 0).decode(1).build()))
    plans = PlanBuilder(generation=2).load(7, 0)
    plans.start(1, [*PROMPT[:4], 3], [7, 2], first=4).decode(1)
    assert ok(executor.apply(plans.build())) == expected([*PROMPT[:4], 3], 1)
    executor.begin(3)
    plans = PlanBuilder(generation=3).load(7, 0)
    result = executor.apply(plans.start(1, PROMPT, [7, 2], first=4).chunk(1, 4, 2, samples=True).build())
    assert "page 7 is loaded from host page 0, which no save has written" in result.detail


def test_pages_written_by_a_failed_step_may_not_be_read() -> None:
    executor, plans = Executor(HOSTED, faults=Faults(fail_steps=frozenset({2}))), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    plans.save(2, 0).start(2, [9] * 4, [1]).chunk(2, 0, 4, samples=True)
    assert executor.apply(plans.build()).status == pb.STEP_STATUS_FAILED
    for plans in (
        PlanBuilder(generation=2).start(1, [*PROMPT[:4], 9], [1, 3], first=4).decode(1),
        PlanBuilder(generation=3).load(4, 0).start(1, PROMPT, [4]).chunk(1, 0, 1, samples=False),
    ):
        assert executor.apply(plans.build()).status == pb.STEP_STATUS_FAILED
    assert ["reads back token" in executor.violations[0], "no save" in executor.violations[1]] == [True, True]


WRONG_MOVES = [
    ("page 3 is loaded from host page 1, which no save", lambda p: p.load(3, 1)),
    ("host page 3 is outside 0 … 2", lambda p: p.save(1, 3)),
    ("host page -1 is outside 0 … 2", lambda p: p.load(1, -1)),
    ("page 0 is to be saved", lambda p: p.save(0, 1)),
    ("page 16 is to be loaded", lambda p: p.save(1, 1).load(16, 1)),
    ("page 0 is to be copied to", lambda p: p.copy(1, 0, 1)),
    ("page 16 is to be copied from", lambda p: p.copy(16, 1, 1)),
    ("saved to twice", lambda p: p.save(1, 1).save(2, 1)),
    ("a page is loaded twice", lambda p: p.save(1, 1).load(3, 1).load(3, 1)),
    ("a page is copied to twice", lambda p: p.copy(1, 3, 1).copy(2, 3, 1)),
    ("page 1 is zeroed by the plan that copies from it", lambda p: p.zero(1).copy(1, 3, 1)),
    ("page 1 is loaded by the plan that copies from it", lambda p: p.save(2, 0).load(1, 0).copy(1, 3, 1)),
    ("page 3 is copied to by the plan that copies from it", lambda p: p.copy(1, 3, 1).copy(3, 4, 1)),
    ("0 slots of page 1 are copied", lambda p: p.copy(1, 3, 0)),
    ("5 slots of page 1 are copied", lambda p: p.copy(1, 3, 5)),
    ("3 slots of page 2 are copied, of which 2 were written", lambda p: p.copy(2, 3, 3)),
    ("1 slots of page 9 are copied, of which 0 were written", lambda p: p.copy(9, 3, 1)),
    ("row 1 uses page 1, which was copied or loaded over", lambda p: p.copy(2, 1, 1)),
    ("row 1 uses page 2, which was copied or loaded over", lambda p: p.save(1, 0).load(2, 0)),
    (
        "position 6 on page 4 reads back",
        lambda p: p.copy(2, 4, 2).start(3, [*PROMPT, 1, 2], [1, 4], first=7).chunk(3, 7, 1, samples=True),
    ),
]


@pytest.mark.parametrize(("text", "wrong"), WRONG_MOVES, ids=[text for text, _ in WRONG_MOVES])
def test_a_wrong_page_order_is_a_violation(text: str, wrong: Callable[[PlanBuilder], PlanBuilder]) -> None:
    executor, plans = _filled()
    result = executor.apply(wrong(plans).decode(1).build())
    assert text in result.detail
    assert result.status == pb.STEP_STATUS_FAILED and len(executor.violations) == 1


def test_page_orders_of_unequal_lengths_are_violations() -> None:
    for name, leaf, text in (
        ("saves", "slots", "saves.slots: 0 entries where 1"),
        ("loads", "slots", "loads.slots: 0 entries where 1"),
        ("copies", "counts", "copies.counts: 0 entries where 1"),
    ):
        executor, plans = _filled()
        plan = plans.save(1, 0).load(5, 0).copy(1, 3, 1).decode(1).build()
        setattr(getattr(plan, name), leaf, b"")
        assert text in executor.apply(plan).detail


@pytest.mark.parametrize("moved", ["copied", "loaded"])
def test_nonfinite_values_stay_nonfinite_when_they_are_moved(moved: str) -> None:
    executor, plans = Executor(HOSTED, faults=Faults(nonfinite_token=280)), PlanBuilder()
    prompt = [1, 2, 280]
    executor.apply(plans.start(1, prompt, [1]).chunk(1, 0, 3, samples=True).build())
    plans.copy(1, 2, 3) if moved == "copied" else plans.save(1, 0).load(2, 0)
    # Read as its own past it makes the row what it is; given out for writing it is noticed.
    result = executor.apply(plans.start(2, [*prompt, 4], [2], first=3).decode(2).build())
    assert np.frombuffer(result.nonfinite, "<i4").tolist() == [0]
    result = executor.apply(plans.start(3, [5], [2]).decode(3).build())
    assert "row 3 was given page 2, which holds values that are not finite" in result.detail


def test_positions_before_the_first_nonfinite_value_can_be_shared() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    executor.apply(plans.start(1, [*PROMPT, 280], [1, 2]).chunk(1, 0, 7, samples=True).build())
    prompt = [*PROMPT[:4], 9]
    assert ok(executor.apply(plans.start(2, prompt, [1, 3], first=4).decode(2).build())) == expected(prompt, 1)
    # A copy of the finite part too, on a page that holds nothing else.
    prompt = [*PROMPT, 9]
    plans.copy(2, 4, 2).start(3, prompt, [1, 4], first=6).decode(3)
    assert ok(executor.apply(plans.build())) == expected(prompt, 1)


# Windows -------------------------------------------------------------------------------------------------------------

# Position p reads p - 4 … p and the first two.
WINDOWED = replace(SHAPE, page_size=2, window=5, sink_tokens=2, num_pages=9)
LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def _windowed(**fields: int) -> tuple[Executor, PlanBuilder]:
    """Row 1 holds the 12 tokens of LONG on pages 1 to 6; its next position is 12, which reads 8 on."""
    executor, plans = Executor(replace(WINDOWED, **fields)), PlanBuilder()
    ok(executor.apply(plans.start(1, LONG, list(range(1, 7))).chunk(1, 0, 12, samples=True).build()))
    return executor, plans


def test_pages_before_the_window_can_be_allocated_to_any_row() -> None:
    executor, plans = _windowed()
    # Positions 2 to 7 stand on pages 2 to 4.
    plans.append(1, 3).start(2, [7, 7, 7], [2, 4]).chunk(2, 0, 3, samples=True).decode(1)
    assert ok(executor.apply(plans.build())) == [expected([7, 7, 7], 1)[0], expected(LONG, 2)[1]]
    ok(executor.apply(plans.decode(1, 2).build()))
    assert executor.violations == []


@pytest.mark.parametrize(("page", "sink_tokens"), [(5, 2), (1, 2), (1, 1), (2, 3)])
def test_allocating_a_page_of_the_window_or_the_sinks_is_a_violation(page: int, sink_tokens: int) -> None:
    executor, plans = _windowed(sink_tokens=sink_tokens)
    plans.append(1, 7).start(2, [7], [page]).decode(1, 2)
    assert f"row 1 uses page {page}, which belongs to row 2 since" in executor.apply(plans.build()).detail


def test_a_page_is_free_when_no_later_position_attends_to_it() -> None:
    # Page 5 holds positions 8 and 9. In a window of 4 position 12 sees 9, and 13 does not.
    executor, plans = _windowed(window=4)
    plans.append(1, 7).start(2, [7], [4]).decode(1, 2)
    ok(executor.apply(plans.build()))
    plans.append(2, 5).decode(1, 2)
    ok(executor.apply(plans.build()))
    # In a window of 5 it does.
    executor, plans = _windowed(window=5)
    ok(executor.apply(plans.append(1, 7).decode(1).build()))
    result = executor.apply(plans.start(2, [7], [5]).decode(1, 2).build())
    assert "row 1 uses page 5" in result.detail


def test_a_row_resumes_without_the_pages_before_its_window() -> None:
    executor, plans = _windowed()
    known = [*LONG, *expected(LONG, 1)]
    plans.start(2, known, [1, 0, 0, 0, 5, 6, 7], first=12, num_prompt=12).decode(2)
    assert ok(executor.apply(plans.build())) == [expected(LONG, 2)[1]]
    assert executor.violations == []


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        ([0, 2, 3, 4, 5, 6, 7], "row 2 was given page 0"),
        ([1, 0, 0, 0, 0, 6, 7], "row 2 was given page 0"),
        ([1, 0, 0, 0, 5, 6, 0], "row 2 was given page 0"),
        ([1, 0, 0, 0, 4, 6, 7], "position 8 on page 4 reads back"),
        ([2, 0, 0, 0, 5, 6, 7], "position 0 on page 2 reads back"),
    ],
)
def test_resuming_a_row_without_a_visible_page_is_a_violation(pages: list[int], text: str) -> None:
    executor, plans = _windowed()
    known = [*LONG, *expected(LONG, 1)]
    result = executor.apply(plans.start(2, known, pages, first=12, num_prompt=12).decode(2).build())
    assert text in result.detail


def test_equal_tokens_after_a_different_history_are_a_violation_within_a_window() -> None:
    executor, plans = _windowed(sink_tokens=0)
    other = [7, *LONG[1:]]
    plans.start(2, [*other, 1], [0, 0, 0, 0, 5, 6, 7], first=12).decode(2)
    assert "expected token 5 after the row's own history" in executor.apply(plans.build()).detail


@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(fail_steps=frozenset({2})), pb.STEP_STATUS_FAILED),
        (Faults(oom_steps=frozenset({2})), pb.STEP_STATUS_OUT_OF_MEMORY),
        (Faults(out_of_sync_steps=frozenset({2})), pb.STEP_STATUS_OUT_OF_SYNC),
    ],
)
def test_injected_faults_set_the_step_status_and_are_not_violations(faults: Faults, status: int) -> None:
    executor, plans = Executor(SHAPE, faults=faults), PlanBuilder()
    ok(executor.apply(plans.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    assert executor.apply(plans.decode(1).build()).status == status
    assert executor.apply(plans.decode(1).build()).status == pb.STEP_STATUS_SKIPPED
    newer = PlanBuilder(generation=2)
    ok(executor.apply(newer.start(1, PROMPT, [1, 2]).chunk(1, 0, 6, samples=True).build()))
    assert executor.violations == []


def test_only_steps_with_the_failing_token_fail() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(fail_token=281)), PlanBuilder()
    ok(executor.apply(plans.start(1, [1, 2], [1]).chunk(1, 0, 2, samples=True).build()))
    plans.start(2, [1, 281, 3], [2]).chunk(2, 0, 1, samples=False)
    ok(executor.apply(plans.decode(1).build()))
    assert executor.apply(plans.chunk(2, 1, 1, samples=False).build()).status == pb.STEP_STATUS_FAILED
    assert executor.violations == []


def test_a_nonfinite_token_affects_only_its_own_row() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    plans.start(1, [1, 2], [1]).chunk(1, 0, 2, samples=True)
    plans.start(2, [1, 280], [2]).chunk(2, 0, 2, samples=True)
    result = executor.apply(plans.build())
    assert np.frombuffer(result.nonfinite, dtype="<i4").tolist() == [1]
    assert tokens_of(result) == [expected([1, 2], 1)[0], -1]
    # Its pages have no owner until they are zeroed, and what it still computes is not finite either.
    later = executor.apply(plans.decode(1, 2).build())
    assert np.frombuffer(later.nonfinite, dtype="<i4").tolist() == [1]
    plans.zero(2).start(3, [5, 5], [2]).chunk(3, 0, 2, samples=True)
    assert ok(executor.apply(plans.build())) == expected([5, 5], 1)
    assert executor.violations == []


@pytest.mark.parametrize("appended", [False, True])
def test_allocating_a_nonfinite_page_is_a_violation(appended: bool) -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    executor.apply(plans.start(1, [280], [2]).chunk(1, 0, 1, samples=True).build())
    plans.start(3, [5, 5], [3] if appended else [2]).chunk(3, 0, 2, samples=True)
    if appended:
        plans.append(3, 2)
    result = executor.apply(plans.build())
    assert "row 3 was given page 2, which holds values that are not finite" in result.detail


@pytest.mark.parametrize(("page", "tainted"), [(1, False), (2, True), (3, True), (4, False)])
def test_pages_read_by_a_finite_sample_stay_finite(page: int, tainted: bool) -> None:
    first, second = expected([6] * 5, 2)
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=second)), PlanBuilder()
    executor.apply(plans.start(1, [6] * 5, [1, 2, 3]).chunk(1, 0, 5, samples=True).build())
    assert ok(executor.apply(plans.decode(1).build())) == [second]
    # Positions 6 and 7 fill page 2; finite samples have read its first half; 8 and 9 go to page 3.
    for _ in range(4):
        assert tokens_of(executor.apply(plans.decode(1).build())) == [-1]
    result = executor.apply(plans.start(2, [first], [page]).decode(2).build())
    assert ("not finite" in result.detail) == tainted


def test_a_chunk_without_a_sample_marks_its_pages_as_nonfinite() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=280)), PlanBuilder()
    ok(executor.apply(plans.start(1, [280, *PROMPT], [1, 2]).chunk(1, 0, 2, samples=False).build()))
    result = executor.apply(plans.start(2, [5], [1]).decode(2).build())
    assert "row 2 was given page 1, which holds values that are not finite" in result.detail


def test_nonfinite_values_before_the_window_do_not_affect_the_row_but_stay_in_their_page() -> None:
    executor, plans = Executor(WINDOWED, faults=Faults(nonfinite_token=280)), PlanBuilder()
    prompt = [280, *LONG]
    # Position 0 is a sink, which all see.
    result = executor.apply(plans.start(1, prompt, list(range(1, 8))).chunk(1, 0, 13, samples=True).build())
    assert np.frombuffer(result.nonfinite, "<i4").tolist() == [0]
    executor = Executor(replace(WINDOWED, sink_tokens=0), faults=Faults(nonfinite_token=280))
    plans = PlanBuilder().start(1, prompt, list(range(1, 8))).chunk(1, 0, 5, samples=False)
    ok(executor.apply(plans.build()))
    assert ok(executor.apply(plans.chunk(1, 5, 8, samples=True).build())) == expected(prompt, 1)
    ok(executor.apply(plans.start(2, [7], [2]).decode(2).build()))
    assert "row 3 was given page 1, which holds" in executor.apply(plans.start(3, [7], [1]).decode(3).build()).detail


def test_the_hash_of_an_empty_history_is_the_root() -> None:
    want = complete([5], max_new_tokens=1, vocab=SHAPE.sampled_vocab).tokens[0]
    assert mix(extend(ROOT, 5)) % SHAPE.sampled_vocab == want
