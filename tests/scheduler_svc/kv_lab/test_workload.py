"""What is drawn: bounds, sharing, and the same again."""

import pytest

from scheduler_svc.kv_lab.settings import Settings, SettingsError
from scheduler_svc.kv_lab.workload import draw
from tests.scheduler_svc.kv_lab.asking import settings


def test_the_preset_is_the_labs():
    asked = Settings()
    assert (asked.sequences, asked.min_length, asked.max_length) == (100, 100, 3000)
    workload = draw(asked)
    assert len(workload.places) == 100
    lengths = [sequence.length for sequence in workload.in_order()]
    assert len(lengths) == 300
    assert min(lengths) >= 100 and max(lengths) <= 3000
    assert workload.arrivals[0] == 0 and list(workload.arrivals) == sorted(workload.arrivals)


def test_the_same_settings_give_the_same():
    asked = settings(sequences=6, lives=2, max_length=30, prefix_groups=2, prefix_length=5)
    first, second = draw(asked), draw(asked)
    assert first.arrivals == second.arrivals
    for one, other in zip(first.in_order(), second.in_order(), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_more_lives_add_and_do_not_change():
    few = settings(sequences=3, lives=1, max_length=30)
    more = settings(sequences=3, lives=2, max_length=30)
    before = [sequence.tokens.tolist() for sequence in draw(few).in_order()]
    assert [sequence.tokens.tolist() for sequence in draw(more).in_order()][:3] == before


def test_prompts_begin_with_a_prefix_and_samples_share_them():
    asked = settings(sequences=12, lives=2, min_length=20, max_length=40, prefix_groups=2, prefix_length=6, samples=3)
    heads: set[tuple[int, ...]] = set()
    for place in draw(asked).places:
        for request in place:
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
        ({"sequences": 0}, "--sequences is 0; it must be from 1 to 100,000"),
        ({"min_length": 9, "max_length": 8}, "--min-length is 9; it must be from 2 to 8"),
        ({"prompt_share": float("nan")}, "--prompt-share is nan; it must be from 0 to 1"),
        ({"memory_tokens": 7, "page_size": 4}, "--memory-tokens is 7; it must be from 8 to 16,777,216"),
        ({"sequences": 3, "samples": 2}, "--sequences is 3; it must be a multiple of --samples 2"),
        (
            {"sequences": 100_000, "max_length": 1000},
            "--sequences × --lives × --max-length is 100,000,000 tokens; at most 20,000,000 are simulated",
        ),
        ({"window": 0}, "--window is 0; it must be from 1 to 1,048,576"),
    ],
)
def test_a_refusal_names_field_number_and_limit(changes: dict[str, float], words: str):
    with pytest.raises(SettingsError) as refused:
        settings(**changes)
    assert str(refused.value) == words
