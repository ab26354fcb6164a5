"""The arithmetic of the divergence benchmark: where two texts diverge, and the difference of logprobs before that."""

import pytest

from tandem_client.types import TokenLogprob
from tests.measure.divergence.compare import Answer, compare, first_difference, logprob_difference
from tests.measure.divergence.greedy import greedy_error


def logprobs_of(*logprobs: float, top: tuple[tuple[int, float], ...] = ()) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(logprob=logprob, top=top) for logprob in logprobs)


def answer(*tokens: int, logprobs: tuple[TokenLogprob, ...] = (), **fields: int) -> Answer:
    return Answer(
        tokens=tokens,
        logprobs=logprobs or logprobs_of(*[-1.0] * len(tokens)),
        prompt_logprobs=logprobs_of(-2.0),
        **fields,
    )


def test_first_difference_finds_where_texts_diverge() -> None:
    assert first_difference([1, 2, 3], (1, 2, 3)) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_logprobs_of_the_same_token_are_compared() -> None:
    assert logprob_difference(logprobs_of(-1.0, -2.0), logprobs_of(-1.0, -2.5)) == 0.5
    assert logprob_difference((), ()) == 0.0
    # Token 7 is in both lists, at different places; 8 and 9 are in one list each.
    one, other = logprobs_of(-1.0, top=((7, -1.0), (8, -9.0))), logprobs_of(-1.0, top=((9, -5.0), (7, -3.0)))
    assert logprob_difference(one, other) == 2.0


def test_compare_counts_diverged_tokens_and_compares_the_others() -> None:
    alone = [answer(1, 2, 3), answer(4, 5, 6), answer(7, 8, 9)]
    others = [
        answer(1, 2, 3, logprobs=logprobs_of(-1.0, -1.25, -1.0), preemptions=2),
        # After the divergence nothing is comparable.
        answer(4, 6, 6, logprobs=logprobs_of(-1.125, -9.0, -9.0), worker_changes=1),
        answer(7, 8, 8),
    ]
    found = compare("batched", alone, others)
    assert (found.streams, found.diverged, found.tokens, found.tokens_beyond, found.earliest) == (3, 2, 9, 3, 1)
    assert (found.max_logprob_difference, found.max_prompt_logprob_difference) == (0.25, 0.0)
    assert (found.name, found.preempted, found.interrupted) == ("batched", 1, 1)


def test_compare_reports_equal_rounds() -> None:
    found = compare("alone again", [answer(1)], [answer(1)])
    assert (found.diverged, found.earliest, found.max_logprob_difference) == (0, None, 0.0)


def test_greedy_texts_are_compared_up_to_the_first_difference() -> None:
    def top(*pairs: tuple[int, float]) -> TokenLogprob:
        return TokenLogprob(logprob=pairs[0][1], top=pairs)

    exact = [
        answer(5, 6, logprobs=(top((5, -0.1), (6, -2.1)), top((6, -0.5), (7, -0.75)))),
        answer(5, 6, logprobs=(top((5, -0.1), (6, -2.1)), top((6, -0.5), (7, -1.5)))),
        answer(5, 6, logprobs=(top((5, -0.1), (6, -2.1)), top((6, -0.5), (7, -1.5)))),
    ]
    rounded = [
        answer(5, 7, logprobs=logprobs_of(-0.35, -0.5)),
        answer(5, 6, logprobs=logprobs_of(-0.1, -0.5)),
        # Token 9 is not among the alternatives.
        answer(9, 6, logprobs=logprobs_of(-0.1, -9.0)),
    ]
    found = greedy_error("tiny", exact, rounded)
    assert found.equal_until == {1: 2 / 3}
    assert (found.equal_tokens, found.compared_tokens, found.farther_than_best_20) == (3, 5, 1)
    assert found.gaps_at_first_difference == pytest.approx(dict.fromkeys(found.gaps_at_first_difference, 0.25))
    assert found.gaps_of_best_two["p100"] == 2.0
    assert found.max_logprob_difference == pytest.approx(0.25)
