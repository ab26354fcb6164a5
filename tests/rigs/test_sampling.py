"""The oracle uses every setting and obeys every ban; the executor reads both from plans and answers as the oracle."""

import numpy as np
import pytest
from tandem.internal.v1 import worker_pb2 as pb

from tests.rigs.executor import Executor, Shape
from tests.rigs.faults import Faults
from tests.rigs.oracle import complete, logprobs
from tests.rigs.plan_builder import PlanBuilder, int32
from tests.rigs.sampling import MINUS_INFINITY, Logprob, Settings, logprob_of
from tests.rigs.test_executor import PROMPT, SHAPE, ok

POISON = 280
# Each differs from the default, and from the one before it, in one field alone.
GREEDY = [
    {"presence_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.5},
    {"biases": ((3, 1.0),)},
    {"biases": ((4, 1.0),)},
    {"biases": ((4, 2.0),)},
    {"biases": ((3, 2.0), (4, 1.0))},
    {"biases": ((3, 1.0), (4, 2.0))},
    {"allowed": frozenset({1, 2, 3})},
    {"allowed": frozenset({1, 2, 4})},
]
SAMPLED = [
    {},
    {"seed": 1},
    {"sample_idx": 1},
    {"temperature": 0.7},
    {"top_p": 0.5},
    {"top_k": 5},
    {"min_p": 0.5},
    {"typical_p": 0.5},
    *GREEDY,
]


def drawn(num: int = 12, prompt: list[int] = PROMPT, **settings: object) -> tuple[int, ...]:
    return complete(prompt, max_new_tokens=num, vocab=SHAPE.sampled_vocab, settings=Settings(**settings)).tokens


def told(message: pb.Logprobs) -> list[Logprob]:
    own, tops = np.frombuffer(message.logprobs, "<f4"), np.frombuffer(message.top_logprobs, "<f4")
    ids = np.frombuffer(message.top_token_ids, "<i4").reshape(len(own), message.top_k).tolist()
    tops = tops.reshape(len(own), message.top_k).tolist()
    return [
        Logprob(logprob=own[i].item(), top=tuple(zip(ids[i], tops[i], strict=True))) for i in range(len(own))
    ]  # fmt: skip


def test_every_setting_changes_the_tokens() -> None:
    greedy = [drawn(), *(drawn(**settings) for settings in GREEDY)]
    assert len(set(greedy)) == len(greedy)
    sampled = [drawn(**{"temperature": 0.5, **settings}) for settings in SAMPLED]
    assert len({*sampled, *greedy}) == len(sampled) + len(greedy)


@pytest.mark.parametrize("name", ["seed", "sample_idx", "top_k"])
def test_greedy_sampling_ignores_noise_and_filters(name: str) -> None:
    assert drawn(**{name: 3}) == drawn()


def test_only_penalties_of_output_tokens_depend_on_the_prompt_length() -> None:
    keys = [Settings(presence_penalty=1.0).key(n) for n in (3, 4)]
    assert keys[0] != keys[1]
    assert Settings(repetition_penalty=2.0).key(3) == Settings(repetition_penalty=2.0).key(4)


def test_floats_are_rounded_to_float32_as_in_the_proto() -> None:
    narrow = float(np.float32(0.7))
    assert narrow != 0.7
    assert drawn(temperature=0.7, presence_penalty=0.1) == drawn(
        temperature=narrow, presence_penalty=float(np.float32(0.1))
    )


def test_banned_tokens_are_never_drawn_and_only_allowed_tokens_are_drawn() -> None:
    first = drawn()[0]
    banned = drawn(200, biases=((first, MINUS_INFINITY), (5, MINUS_INFINITY)))
    assert not {first, 5} & set(banned)
    allowed = drawn(200, allowed=frozenset({5, 6, 287}), biases=((6, MINUS_INFINITY),))
    assert set(allowed) == {5, 287}
    early = complete(
        PROMPT,
        max_new_tokens=50,
        vocab=SHAPE.sampled_vocab,
        settings=Settings(allowed=frozenset({5, 6, 7})),
        min_new_tokens=20,
        stop_token_ids=(5, 6),
    ).tokens
    assert set(early[:20]) == {7}
    assert early[-1] in (5, 6)
    assert len(early) > 20
    with pytest.raises(ValueError, match="all of the 1 tokens that are allowed are banned"):
        drawn(allowed=frozenset({5}), biases=((5, MINUS_INFINITY),))


def test_logprobs_are_sorted_and_exact_in_float32() -> None:
    entry = logprob_of(12345, 9, vocab_size=288, top_k=288)
    values = dict(entry.top)
    assert values[9] == entry.logprob
    assert len(values) == 288
    ordered = [logprob for _, logprob in entry.top]
    assert ordered == sorted(ordered, reverse=True)
    assert all(float(np.float32(value)) == value <= 0 for value in ordered)
    assert logprob_of(12345, 9, vocab_size=288, top_k=3).top == entry.top[:3]
    assert logprob_of(12346, 9, vocab_size=288, top_k=3) != logprob_of(12345, 9, vocab_size=288, top_k=3)


@pytest.mark.parametrize("settings", SAMPLED)
def test_the_executor_reads_every_setting_from_the_plan(settings: dict[str, object]) -> None:
    settings = {"temperature": 0.5, **settings}
    executor, plans = Executor(SHAPE), PlanBuilder()
    # Beside a row that asks for nothing, so that their fields may not be mixed up.
    plans.start(2, [9], [3, 4, 5]).start(1, PROMPT, [1, 2, 6], **settings)
    out = [ok(executor.apply(plans.chunk(1, 0, 6, samples=True).decode(2).build()))]
    out += [ok(executor.apply(plans.decode(1, 2).build())) for _ in range(5)]
    assert [tokens[0] for tokens in out] == list(drawn(6, **settings))
    assert [tokens[1] for tokens in out] == list(drawn(6, [9]))
    assert executor.violations == []


def test_the_executor_returns_the_logprobs_of_the_oracle() -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    plans.start(1, PROMPT, [1, 2, 3], num_logprobs=3, prompt_logprobs_from=2)
    plans.start(2, [9, 9], [4, 5]).start(3, [8, 6], [6, 7], num_logprobs=1)
    plans.chunk(1, 0, 4, samples=False).chunk(2, 0, 2, samples=True).chunk(3, 0, 2, samples=True)
    first = executor.apply(plans.build())
    outputs = ok(first)
    assert told(first.prompt_logprobs) == logprobs(PROMPT, start=2, vocab_size=288, top_k=2)[:3]
    assert told(first.logprobs) == logprobs([8, 6, outputs[1]], start=2, vocab_size=288, top_k=0)
    second = executor.apply(plans.chunk(1, 4, 2, samples=True).decode(2, 3).build())
    outputs = [*outputs, *ok(second)]
    assert told(second.prompt_logprobs) == logprobs(PROMPT, start=5, vocab_size=288, top_k=2)
    own, other = told(second.logprobs)
    assert own == logprobs([*PROMPT, outputs[2]], start=6, vocab_size=288, top_k=2)[0]
    [expected] = logprobs([8, 6, outputs[1], outputs[4]], start=3, vocab_size=288, top_k=0)
    assert other.logprob == expected.logprob
    # The second row wants no alternatives: what stands there is wrong on purpose.
    assert [logprob for _, logprob in other.top] == [1.0, 1.0]
    assert executor.violations == []


def test_logprobs_after_a_nonfinite_token_are_nan() -> None:
    executor, plans = Executor(SHAPE, faults=Faults(nonfinite_token=POISON)), PlanBuilder()
    prompt = [1, 2, POISON, 3, 4]
    plans.start(1, prompt, [1, 2], num_logprobs=2, prompt_logprobs_from=1).chunk(1, 0, 5, samples=True)
    result = executor.apply(plans.build())
    values = np.frombuffer(result.prompt_logprobs.logprobs, "<f4")
    assert np.isnan(values).tolist() == [False, False, True, True]
    assert np.isnan(np.frombuffer(result.logprobs.logprobs, "<f4")).tolist() == [True]
    assert np.frombuffer(result.nonfinite, "<i4").tolist() == [0]


TIGHT = Shape(page_size=4, num_pages=16, max_rows=2, chunk_align=2, spare_logit_rows=3, token_budget=32)


@pytest.mark.parametrize(("wanted_from", "is_fine"), [(5, True), (4, True), (3, False), (1, False)])
def test_a_plan_beyond_the_limit_of_logits_is_a_violation(wanted_from: int, is_fine: bool) -> None:
    # Five: a sample of each row, and three of the prompt's.
    executor, plans = Executor(TIGHT), PlanBuilder()
    plans.start(1, [1] * 7, [1, 2], prompt_logprobs_from=wanted_from).chunk(1, 0, 7, samples=True)
    plans.start(2, [2], [3]).decode(2)
    result = executor.apply(plans.build())
    if is_fine:
        ok(result)
    else:
        assert "logits of" in result.detail
        assert "the limit is 5" in result.detail


# What the violation says, how the row is started, and what then takes the place of its fields.
WRONG: list[tuple[str, dict[str, object], dict[str, bytes]]] = [
    ("of which 0 are its prompt", {"num_prompt": 0}, {}),
    ("of which 7 are its prompt", {"num_prompt": 7}, {}),
    ("logprobs from 6 of a prompt of 6", {"prompt_logprobs_from": 6}, {}),
    ("logprobs from -1", {"prompt_logprobs_from": -1}, {}),
    ("has output already", {"prompt_logprobs_from": 1, "num_prompt": 4}, {}),
    ("biases a token outside", {"biases": ((288, 1.0),)}, {}),
    ("allows a token outside", {"allowed": frozenset({288})}, {}),
    ("num_logprobs is set and no row asks", {}, {"num_logprobs": int32([0])}),
    ("num_prompt_tokens: 0 entries where 1 belong", {}, {"num_prompt_tokens": b""}),
    ("num_sampling_bytes: 2 entries where 1 belong", {}, {"num_sampling_bytes": int32([1, 1])}),
    ("sampling: 3 entries where", {}, {"sampling": b"abc"}),
    ("sampling is not a SamplingParams", {}, {"sampling": b"\xff", "num_sampling_bytes": int32([1])}),
    ("sampling lacks top_p", {}, {"sampling": b"\r\0\0\0\0", "num_sampling_bytes": int32([5])}),
]


@pytest.mark.parametrize(("violation", "wish", "fields"), WRONG)
def test_wrong_rows_are_violations(violation: str, wish: dict[str, object], fields: dict[str, bytes]) -> None:
    executor, plans = Executor(SHAPE), PlanBuilder()
    plan = plans.start(1, PROMPT, [1, 2], **wish).chunk(1, 0, 6, samples=True).build()
    for name, data in fields.items():
        setattr(plan.started, name, data)
    result = executor.apply(plan)
    assert result.status == pb.STEP_STATUS_FAILED and violation in result.detail
