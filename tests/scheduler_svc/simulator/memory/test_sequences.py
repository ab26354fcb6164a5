"""The draws of a workload: bounds, sharing, repeatability; and the checks of its settings."""

import pytest
from pydantic import ValidationError

from scheduler_svc.simulator.layouts import Settings, draw
from tests.scheduler_svc.simulator.memory.asking import settings


def test_the_default_has_100_sequences_of_100_to_3000_tokens():
    asked = Settings()
    assert (asked.sequences, asked.min_length, asked.max_length) == (100, 100, 3000)
    clients, arrivals = draw(asked)
    assert len(clients) == 100
    lengths = [sequence.length for client in clients for sequence in client]
    assert len(lengths) == 300
    assert min(lengths) >= 100 and max(lengths) <= 3000
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)


def tokens_of(asked: Settings) -> list[list[list[int]]]:
    return [[sequence.tokens.tolist() for sequence in client] for client in draw(asked)[0]]


def test_equal_settings_draw_equal_sequences():
    asked = settings(sequences=6, lives=2, max_length=30, prefix_groups=2, prefix_length=5)
    assert tokens_of(asked) == tokens_of(asked)
    assert draw(asked)[1] == draw(asked)[1]


def test_more_rounds_do_not_change_the_first_rounds():
    few = tokens_of(settings(sequences=3, lives=1, max_length=30))
    more = tokens_of(settings(sequences=3, lives=2, max_length=30))
    assert [client[:1] for client in more] == few


def test_prompts_begin_with_a_prefix():
    asked = settings(sequences=12, lives=2, min_length=20, max_length=40, prefix_groups=2, prefix_length=6)
    heads = {tuple(tokens[:6]) for client in tokens_of(asked) for tokens in client}
    assert len(heads) == 2 and all(len(set(head)) == 6 for head in heads)
    assert all(1 <= sequence.prompt < sequence.length for client in draw(asked)[0] for sequence in client)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_length": 9, "max_length": 8}, "--min-length is 9; it must be at most --max-length 8"),
        ({"memory_tokens": 7, "page_size": 4}, "--memory-tokens is 7; it must be at least 8 (two pages)"),
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
