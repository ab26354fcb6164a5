"""The masks of the mask server are llguidance's own, also if the server dies in between."""

import re
import subprocess
import sys
from contextlib import closing

import llguidance
import numpy as np
import pytest

from gpu_worker.constraints.constraints import Constraints, refusal
from gpu_worker.constraints.frames import MAX_NUMBER
from gpu_worker.constraints.rows import Fate
from tests.gpu_worker.constraints.rig import (
    ALL,
    CHOICE,
    EOS,
    OBJECT,
    SIZES,
    SUM,
    WORD,
    Walk,
    allowed,
    hash_of,
    kill_server,
    mask_of,
    masks_of,
    own_tokenizer,
    prepare,
    serving,
    text_of,
)

NO_TOKENS = np.zeros(0, np.int32)


def has(constraints: Constraints, source: str) -> bool:
    """Whether a row with the constraint gets a mask."""
    constraints.start(8, hash_of(source), NO_TOKENS)
    masks_of(constraints, 8)
    return constraints.row(8).fate is Fate.OPEN


@pytest.mark.parametrize("seed", range(3))
def test_masks_and_ends_are_those_of_a_matcher_in_this_process(seed: int) -> None:
    with serving() as constraints:
        assert set(prepare(constraints, *ALL).values()) == {""}
        walk = Walk(constraints=constraints, sources=[*ALL, *ALL], seed=seed)
        walk.run(120)
        for row, source in enumerate(walk.sources, 1):
            if constraints.row(row).fate is Fate.OPEN:
                continue
            fresh = llguidance.LLMatcher(own_tokenizer(), source, log_level=0)
            tokens = [token for token in walk.outputs[row] if token != EOS]
            assert fresh.consume_tokens(tokens) and fresh.is_accepting(), text_of(tokens)


@pytest.mark.parametrize("everything", [False, True], ids=["server", "both processes"])
def test_a_server_that_is_killed_between_steps_changes_no_mask(everything: bool) -> None:
    with serving() as constraints:
        prepare(constraints, *ALL)
        walk = Walk(constraints=constraints, sources=[*ALL, *ALL], seed=9)
        for _ in range(4):
            walk.run(6)
            kill_server(constraints, everything=everything)
        walk.run(100)
        assert not walk.failed


def test_numbers_of_constraints_starts_and_requests_begin_again_after_the_largest() -> None:
    """A worker of a busy service asks for more than 2^31 masks within months."""
    with serving() as constraints:
        # Numbers that are in use are left out.
        assert prepare(constraints, SUM) == {SUM: ""}
        constraints._num_constraints = constraints._num_starts = MAX_NUMBER - 2
        constraints._supervisor._num_requests = MAX_NUMBER - 2
        assert set(prepare(constraints, OBJECT, WORD, CHOICE).values()) == {""}
        Walk(constraints=constraints, sources=[*ALL, *ALL], seed=6).run(30)


def test_a_row_that_starts_with_output_continues_where_that_ends() -> None:
    with serving() as constraints:
        prepare(constraints, OBJECT, WORD)
        walk = Walk(constraints=constraints, sources=[OBJECT, WORD], seed=4)
        walk.run(2)
        assert len(walk.open_rows) == 2
        for row, tokens in walk.outputs.items():
            constraints.start(row, hash_of(walk.sources[row - 1]), np.array(tokens, np.int32))
        walk.run(100)
        assert not walk.open_rows


def test_a_row_that_starts_again_begins_its_constraint_again() -> None:
    """Rows of one constraint do not share their outputs."""
    with serving() as constraints:
        prepare(constraints, WORD)
        for seed in range(2):
            walk = Walk(constraints=constraints, sources=[WORD] * 8, seed=seed)
            walk.run(20)
            texts = [text_of(tokens) for tokens in walk.outputs.values()]
            assert len(set(texts)) > 1 and all(re.fullmatch("[a-f]{3,9}", text) for text in texts)


def test_rows_may_start_before_their_constraint_is_prepared() -> None:
    """Their prompts are computed meanwhile. If it is refused, they fail with the reason."""
    bad = llguidance.LLMatcher.grammar_from_json_schema('{"type": "array", "uniqueItems": true}')
    with serving() as constraints:
        for row, source in ((1, WORD), (2, bad)):
            constraints.prepare(hash_of(source), source.encode())
            constraints.start(row, hash_of(source), NO_TOKENS)
        answers: list[tuple[bytes, str]] = []
        while len(answers) < 2:
            answers += constraints.answers()
        assert constraints.row(2).fate is Fate.FAILED and "uniqueItems" in constraints.row(2).detail
        assert masks_of(constraints, 1) == [allowed(mask_of(llguidance.LLMatcher(own_tokenizer(), WORD)))]


def test_sources_that_cannot_be_used_are_refused_with_a_sentence() -> None:
    bad = llguidance.LLMatcher.grammar_from_json_schema('{"type": "array", "uniqueItems": true}')
    empty = "start: /a/ & /b/"
    with serving() as constraints:
        answers = prepare(constraints, bad, empty, "start: (", WORD)
        assert "uniqueItems" in answers[bad] and "\n" not in answers[bad]
        assert answers[empty] and answers["start: ("]
        assert answers[WORD] == ""
        assert not has(constraints, bad) and has(constraints, WORD)


def test_a_constraint_that_was_dropped_is_unknown_until_it_is_prepared_again() -> None:
    with serving() as constraints:
        prepare(constraints, WORD, SUM)
        # At once, because the worker has it already.
        assert prepare(constraints, WORD) == {WORD: ""}
        constraints.drop(hash_of(WORD))
        assert not has(constraints, WORD)
        prepare(constraints, WORD)
        Walk(constraints=constraints, sources=[WORD, SUM]).run(20)
        constraints.begin_session()
        assert not has(constraints, SUM) and not constraints.is_preparing
        prepare(constraints, SUM)
        Walk(constraints=constraints, sources=[SUM]).run(20)


def test_a_complete_row_may_have_any_token() -> None:
    with serving() as constraints:
        prepare(constraints, CHOICE)
        walk = Walk(constraints=constraints, sources=[CHOICE])
        walk.run(20)
        own = constraints.row(1)
        assert masks_of(constraints, own) == [[*range(SIZES.vocab_size)]]
        assert own.fate in (Fate.COMPLETE, Fate.ENDED)
        constraints.learn([(own, 7)])
        assert own.fate is not Fate.FAILED


def test_a_token_that_the_constraint_does_not_allow_fails_the_row() -> None:
    """As after a start with an output of another constraint."""
    with serving() as constraints:
        prepare(constraints, WORD)
        constraints.start(1, hash_of(WORD), np.array([20], np.int32))
        constraints.start(2, hash_of(WORD), NO_TOKENS)
        masks_of(constraints, 1, 2)
        rows = [constraints.row(1), constraints.row(2)]
        assert [own.fate for own in rows] == [Fate.FAILED, Fate.OPEN]
        assert "output token 1" in rows[0].detail and "\n" not in rows[0].detail


def test_a_model_without_eos_gets_no_mask_with_one() -> None:
    with serving(eos=()) as constraints:
        prepare(constraints, WORD)
        constraints.start(1, hash_of(WORD), np.array([66] * 4, np.int32))
        truth = llguidance.LLMatcher(own_tokenizer(), WORD)
        truth.consume_tokens([66] * 4)
        assert EOS in (every := allowed(mask_of(truth)))
        assert masks_of(constraints, 1) == [[token for token in every if token != EOS]]


def test_a_tokenizer_that_llguidance_cannot_read_refuses_every_constraint() -> None:
    with closing(Constraints(b'{"version": "1.0"}', SIZES, [EOS])) as constraints:
        for _ in range(2):
            assert "tokenizer" in prepare(constraints, WORD)[WORD]


def test_no_module_of_the_server_loads_torch() -> None:
    program = (
        "import sys, gpu_worker.constraints.__main__, gpu_worker.constraints.server, gpu_worker.constraints.matchers\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_worker_says_why_it_takes_no_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(b"{}") == ""
    assert "the model has no tokenizer" in refusal(b"")
    monkeypatch.setattr("gpu_worker.constraints.constraints.find_spec", lambda name: None)
    assert "llguidance" in refusal(b"{}")
