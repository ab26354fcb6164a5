"""Outputs that are kept and sorted by sample, compared with a plain loop over their tokens."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem.internal.v1 import frontend_pb2

from scheduler_svc.frontend.streaming.step_output import Arrivals
from tests.scheduler_svc.frontend.fake_core import step_output

NOW = 5.0


def output(rows: Sequence[tuple[int, int, int]]) -> frontend_pb2.StepOutput:
    """A step's output with a (sample id, offset, token) per entry."""
    return step_output(*zip(*rows, strict=True)) if rows else step_output([], [], [])


ids = st.integers(0, 2**64 - 1) | st.integers(1, 4)
rows = st.lists(st.tuples(ids, st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=8)


@given(st.lists(rows, min_size=1, max_size=5))
def test_tokens_come_out_by_sample_in_order_of_arrival(steps: list[list[tuple[int, int, int]]]):
    arrivals = Arrivals()
    for step in steps:
        assert arrivals.add(output(step), NOW)
    expected: dict[int, list[tuple[int, int]]] = {}
    for sample_id, offset, token in itertools.chain(*steps):
        expected.setdefault(sample_id, []).append((offset, token))
    found = list(arrivals.take())
    assert [sample_id for sample_id, *_ in found] == sorted(expected)
    for sample_id, first, count, is_complete, data in found:
        offsets, tokens = map(list, zip(*expected[sample_id], strict=True))
        assert (first, count) == (offsets[0], len(offsets))
        assert is_complete == (offsets == list(range(first, first + count)))
        assert np.frombuffer(data, "i4").tolist() == tokens
    assert not arrivals


@pytest.mark.parametrize(
    "refused",
    [
        output([]),
        output([(1, 3, 7), (2, 0, 7)]),
        frontend_pb2.StepOutput(ends=[frontend_pb2.End(stream=1)]),
        frontend_pb2.StepOutput(prompt_logprobs=[frontend_pb2.PromptLogprobs(stream=1)]),
        step_output([1], [3], [7], logprobs=frontend_pb2.TokenLogprobs()),
    ],
    ids=["nothing", "a first token", "an end", "logprobs of a prompt", "logprobs"],
)
def test_outputs_that_may_not_wait_are_not_kept(refused: frontend_pb2.StepOutput):
    arrivals = Arrivals()
    assert arrivals.add(output([(1, 2, 7)]), NOW)
    assert not arrivals.add(refused, NOW + 1)
    assert [sample_id for sample_id, *_ in arrivals.take()] == [1]


def test_the_age_is_that_of_the_oldest_output():
    arrivals = Arrivals()
    arrivals.add(output([(1, 2, 7)]), NOW)
    arrivals.add(output([(1, 3, 7)]), NOW + 1)
    assert arrivals.since == NOW
    list(arrivals.take())
    arrivals.add(output([(1, 4, 7)]), NOW + 2)
    assert arrivals.since == NOW + 2
