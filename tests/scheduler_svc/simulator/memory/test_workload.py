"""The draws of a workload: bounds, sharing, repeatability; and the checks of its settings."""

import pytest
from pydantic import ValidationError

from scheduler_svc.simulator.memory.settings import Settings
from scheduler_svc.simulator.memory.workload import draw
from tests.scheduler_svc.simulator.memory.asking import settings


def test_the_default_has_100_sequences_of_100_to_3000_tokens():
    asked = Settings()
    assert (asked.sequences, asked.min_length, asked.max_length) == (100, 100, 3000)
    workload = draw(asked)
    assert len(workload.clients) == 100
    lengths = [sequence.length for sequence in workload.in_order()]
    assert len(lengths) == 300
    assert min(lengths) >= 100 and max(lengths) <= 3000
    assert workload.arrivals[0] == 0 and list(workload.arrivals) == sorted(workload.arrivals)


def test_equal_settings_draw_equal_workloads():
    asked = settings(sequences=6, lives=2, max_length=30, prefix_groups=2, prefix_length=5)
    first, second = draw(asked), draw(asked)
    assert first.arrivals == second.arrivals
    for one, other in zip(first.in_order(), second.in_order(), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_more_rounds_do_not_change_the_first_rounds():
    few = settings(sequences=3, lives=1, max_length=30)
    more = settings(sequences=3, lives=2, max_length=30)
    before = [sequence.tokens.tolist() for sequence in draw(few).in_order()]
    assert [sequence.tokens.tolist() for sequence in draw(more).in_order()][:3] == before


def test_prompts_begin_with_a_prefix_and_samples_share_a_prompt():
    asked = settings(sequences=12, lives=2, min_length=20, max_length=40, prefix_groups=2, prefix_length=6, samples=3)
    heads: set[tuple[int, ...]] = set()
    for client in draw(asked).clients:
        for request in client:
            assert len(request) == 3
            prompt = request[0].tokens[: request[0].prompt].tolist()
            for sample in request:
                assert sample.request == request[0].request
                assert sample.tokens[: sample.prompt].tolist() == prompt
                assert sample.length > sample.prompt
            heads.add(tuple(prompt[:6]))
    assert len(heads) == 2 and all(len(set(head)) == 6 for head in heads)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_length": 9, "max_length": 8}, "--min-length is 9; it must be at most --max-length 8"),
        ({"memory_tokens": 7, "page_size": 4}, "--memory-tokens is 7; it must be at least 8 (two pages)"),
        ({"sequences": 3, "samples": 2}, "--sequences is 3; it must be a multiple of --samples 2"),
        (
            {"sequences": 100_000, "max_length": 1000},
            "--sequences × --lives × --max-length is 100,000,000 tokens; it must be at most 20,000,000",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(changes: dict[str, float], words: str):
    with pytest.raises(ValidationError) as refused:
        settings(**changes)
    (problem,) = refused.value.errors()
    assert str(problem.get("ctx", {}).get("error")) == words
