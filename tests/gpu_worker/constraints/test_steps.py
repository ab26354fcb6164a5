"""Constrained rows in the worker's steps: their outputs satisfy the constraints, and other rows notice nothing."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import jsonschema
import numpy as np
import pytest
import torch
from tandem.internal.v1 import worker_pb2 as pb

from gpu_worker.constraints.constraints import Constraints
from gpu_worker.constraints.watch import DEFAULT_LIMITS, Limits
from gpu_worker.step.constrained import ConstrainedSteps
from gpu_worker.wire.frames import Outcome
from tests.gpu_worker.constraints.rig import (
    CHOICE,
    EOS,
    OBJECT,
    SIZES,
    SLOW_LATER,
    SUM,
    WORD,
    hash_of,
    kill_server,
    prepare,
    text_of,
    tokenizer_json,
)
from tests.gpu_worker.plans import TinyCore
from tests.gpu_worker.rig import VOCAB_SIZE, Rig, RigSpec
from tests.gpu_worker.rig_specs import SPECS
from tests.gpu_worker.step.fake_gpu import as_on_gpu

DRAWN = {"temperature": 1.0, "top_p": 0.95}
SOURCES = {1: OBJECT, 2: WORD, 3: CHOICE}


@pytest.fixture(scope="module")
def rig(rig_of: Callable[[RigSpec], Rig]) -> Rig:
    assert SIZES.vocab_size == VOCAB_SIZE
    return rig_of(SPECS[0])


@contextmanager
def constraining(rig: Rig) -> Iterator[Callable[[Limits], Constraints]]:
    """Lets the rig's worker take constraints."""
    made: list[Constraints] = []

    def make(limits: Limits = DEFAULT_LIMITS) -> Constraints:
        constraints = Constraints(tokenizer_json(), SIZES, [EOS], limits)
        made.append(constraints)
        upload = rig.runner.steps.mask_upload(max_rows=SIZES.max_rows, mask_words=SIZES.mask_words)
        rig.runner.execution.constrained = ConstrainedSteps(constraints, upload)
        return constraints

    yield make
    rig.runner.execution.constrained = None
    for constraints in made:
        constraints.close()


@pytest.fixture
def constrain(rig: Rig) -> Iterator[Callable[[Limits], Constraints]]:
    with constraining(rig) as make:
        yield make


@dataclass(kw_only=True)
class Run:
    """Rows that run until their constraints end them, as a scheduler plans them."""

    rig: Rig
    sources: Mapping[int, str]
    core: TinyCore
    # By row.
    outputs: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)

    def plan(self, rows: Sequence[int], *, chunks: Mapping[int, int] | None = None) -> pb.StepPlan:
        """Rows that have not started compute their prompt; the others decode."""
        fresh = {row: len(self.core.rows[row].tokens) for row in rows if not self.core.rows[row].started}
        decode = [row for row in rows if row not in fresh and row not in (chunks or {})]
        plan = self.core.plan(chunks={**fresh, **(chunks or {})}, decode=decode)
        started = np.frombuffer(plan.started.rows, "<i4").tolist()
        if any(row in self.sources for row in started):
            hashes = [hash_of(self.sources[row]) if row in self.sources else bytes(32) for row in started]
            plan.started.constraints = b"".join(hashes)
        return plan

    def take(self, outcome: Outcome, sampled: Sequence[int]) -> None:
        assert outcome.status == pb.STEP_STATUS_OK, outcome.detail
        self.core.learn(outcome.tokens, sampled)
        for place, (row, token) in enumerate(zip(sampled, outcome.tokens.tolist(), strict=True)):
            if row in self.ends:
                continue
            self.outputs.setdefault(row, []).append(token)
            if row not in self.sources:
                continue
            if place in outcome.constraint_failed:
                self.ends[row] = outcome.constraint_detail
            elif token == EOS:
                self.ends[row] = "eos"
            elif place in outcome.constraint_complete:
                self.ends[row] = "complete"

    def go(self, rows: Sequence[int], num_steps: int) -> None:
        """Decodes the rows that have not ended, one plan at a time."""
        for _ in range(num_steps):
            decode = [row for row in rows if row not in self.ends]
            if not decode:
                return
            self.take(self.rig.submit(self.plan(decode)), decode)


def run_of(rig: Rig, sources: Mapping[int, str], *, rows: Sequence[int] = (1, 2, 3), num_prompt: int = 5) -> Run:
    """Rows with prompts that are not computed yet."""
    run = Run(rig=rig, sources=sources, core=rig.core())
    for row in rows:
        tokens = rig.prompt(num_prompt, seed=row)
        run.core.add(row, tokens, seed=70 + row, **DRAWN)
    return run


@pytest.fixture(scope="module")
def expected(rig: Rig) -> Run:
    """Rows with their constraints, undisturbed."""
    with constraining(rig) as constrain:
        prepare(constrain(), *SOURCES.values())
        run = run_of(rig, SOURCES)
        run.go([1, 2, 3], 100)
    return run


def check(source: str, tokens: Sequence[int]) -> None:
    """By other means than llguidance."""
    text = text_of(tokens)
    if source == OBJECT:
        kind = {"enum": ["a", "bc"]}
        properties = {"kind": kind, "ok": {"type": "boolean"}, "size": {"type": "integer"}}
        schema = {"properties": properties, "required": [*properties], "additionalProperties": False}
        jsonschema.validate(json.loads(text), schema)
    elif source == SUM:
        assert re.fullmatch(r"[0-9+()]+", text) and eval(re.sub(r"\b0+(?=\d)", "", text)) >= 0
    else:
        assert re.fullmatch({WORD: "[a-f]{3,9}", CHOICE: "yes|no|nothing"}[source], text)


def test_outputs_satisfy_their_constraints(rig: Rig, constrain: Callable[..., Constraints]) -> None:
    prepare(constrain(), *SOURCES.values())
    for seed in range(4):
        run = run_of(rig, SOURCES, num_prompt=3 + seed)
        run.go([1, 2, 3], 100)
        assert set(run.ends) == {1, 2, 3} and set(run.ends.values()) <= {"eos", "complete"}, run.ends
        for row, source in SOURCES.items():
            check(source, run.outputs[row])


def test_rows_without_constraints_get_the_tokens_that_they_get_alone(
    rig: Rig, constrain: Callable[..., Constraints]
) -> None:
    alone = run_of(rig, {})
    alone.go([1, 2, 3], 20)
    prepare(constrain(), WORD)
    mixed = run_of(rig, {2: WORD})
    mixed.go([1, 2, 3], 20)
    assert mixed.outputs[1] == alone.outputs[1] and mixed.outputs[3] == alone.outputs[3]
    assert mixed.outputs[2] != alone.outputs[2][: len(mixed.outputs[2])]
    check(WORD, mixed.outputs[2])


def test_a_row_has_the_same_output_with_other_rows_and_after_a_restart(
    rig: Rig, constrain: Callable[..., Constraints], expected: Run
) -> None:
    """Started again elsewhere with its first tokens, as after the worker's death."""
    prepare(constrain(), OBJECT)
    again = Run(rig=rig, sources={2: OBJECT}, core=rig.core())
    known = expected.outputs[1][:4]
    prompt = rig.prompt(5, seed=1)
    again.core.add(2, [*prompt, *known], num_prompt=5, seed=71, **DRAWN)
    again.go([2], 100)
    assert [*known, *again.outputs[2]] == expected.outputs[1]


def test_prompts_in_chunks_sample_under_their_constraint(rig: Rig, constrain: Callable[..., Constraints]) -> None:
    prepare(constrain(), CHOICE)
    run = Run(rig=rig, sources={1: CHOICE, 2: CHOICE}, core=rig.core())
    for row in (1, 2):
        run.core.add(row, rig.prompt(40, seed=row), seed=row, **DRAWN)
    run.take(rig.submit(run.plan([2], chunks={1: 32})), [2])
    run.take(rig.submit(run.plan([2], chunks={1: 8})), [1, 2])
    run.go([1, 2], 20)
    for row in (1, 2):
        check(CHOICE, run.outputs[row])


def test_a_mask_server_that_is_killed_changes_no_token(
    rig: Rig, constrain: Callable[..., Constraints], expected: Run
) -> None:
    """The serving process alone twice, then twice with the one that forks it."""
    constraints = constrain()
    prepare(constraints, *SOURCES.values())
    run = run_of(rig, SOURCES)
    for everything in (False, False, True, True):
        run.go([1, 2, 3], 2)
        kill_server(constraints, everything=everything)
    run.go([1, 2, 3], 100)
    assert (run.outputs, run.ends) == (expected.outputs, expected.ends)


def test_a_slow_mask_fails_its_row_and_not_the_step(
    rig: Rig, constrain: Callable[..., Constraints], expected: Run
) -> None:
    prepare(constrain(Limits(mask=0.03)), OBJECT, WORD, SLOW_LATER)
    run = run_of(rig, {**SOURCES, 3: SLOW_LATER})
    run.go([1, 2, 3], 100)
    # On a busy machine its patience in wall time ends first.
    took = r"the constraint took \d+ ms of CPU time( in \d+ ms and was not done, because the machine is busy)?"
    assert re.fullmatch(rf"{took}; .*\(30 ms x .*\), at output token 2", run.ends[3])
    assert text_of(run.outputs[3][:1]) in ("a", "b")
    assert (run.outputs[1], run.outputs[2]) == (expected.outputs[1], expected.outputs[2])


def test_unknown_constraints_fail_their_rows_or_the_plan(rig: Rig, constrain: Callable[..., Constraints]) -> None:
    run = run_of(rig, {1: WORD})
    outcome = rig.submit(run.plan([1]))
    assert outcome.status == pb.STEP_STATUS_FAILED and "takes none" in outcome.detail
    constrain()
    run = run_of(rig, {1: WORD})
    run.go([1, 2], 3)
    assert run.ends == {1: "the constraint is not prepared"} and len(run.outputs[2]) == 3
    run = run_of(rig, {1: WORD})
    plan = run.plan([1])
    plan.started.constraints = plan.started.constraints[1:]
    assert "31 bytes" in rig.submit(plan).detail


class Ring:
    """Two plans in flight, as on a GPU: each is submitted before the result of the one before it."""

    def __init__(self, run: Run) -> None:
        self.run, self._sampled = run, list[list[int]]()

    def submit(self, rows: Sequence[int]) -> None:
        self.run.rig.runner.submit(self.run.plan(rows))
        self._sampled.append(list(rows))

    def collect(self) -> None:
        outcome = None
        while outcome is None:
            outcome = self.run.rig.runner.collect(wait=False)
        sampled = self._sampled.pop(0)
        for row, token in zip(sampled, outcome.tokens.tolist(), strict=True):
            assert 0 <= token < VOCAB_SIZE, row
        # The placeholder of the plan behind it stays.
        tokens = {row: list(self.run.core.rows[row].tokens) for row in sampled}
        self.run.take(outcome, sampled)
        for row in sampled:
            assert len(tokens[row]) == len(self.run.core.rows[row].tokens)


def test_two_plans_in_flight_as_on_a_gpu(
    rig: Rig, constrain: Callable[..., Constraints], expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that ends is in one more plan, which may give it any token."""
    prepare(constrain(), *SOURCES.values())
    if rig.device.type == "cpu":
        as_on_gpu(rig.runner, monkeypatch)
    run = run_of(rig, SOURCES)
    ring = Ring(run)
    ring.submit([1, 2, 3])
    for _ in range(60):
        rows = [row for row in (1, 2, 3) if row not in run.ends]
        if not rows:
            break
        ring.submit(rows)
        assert rig.runner.num_in_flight == 2
        ring.collect()
    ring.collect()
    assert (run.outputs, run.ends) == (expected.outputs, expected.ends)


def test_a_follower_takes_the_tokens_of_the_leader(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no masks, and makes the same calls that share tokens."""
    shared: list[torch.Tensor] = []

    def share(tokens: torch.Tensor) -> None:
        shared.append(tokens.clone())
        tokens.fill_(42)

    monkeypatch.setattr(rig.runner.execution, "follows", True)
    device = rig.runner.on_device
    monkeypatch.setattr(device, "share_tokens", share)
    run = run_of(rig, {1: WORD})
    outcome = rig.submit(run.plan([1, 2]))
    # The padded steps of a GPU share the tokens of every sample first.
    assert outcome.tokens.tolist() == [42, 42] and len(shared) == (1 if rig.device.type == "cpu" else 2)
    assert device.tables.newest_token[[1, 2]].tolist() == [42, 42]
