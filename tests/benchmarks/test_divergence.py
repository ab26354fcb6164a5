"""The divergence's arithmetic: where two texts part, and how far logprobs are apart until there."""

from tandem_client.types import TokenLogprob
from tests.benchmarks.divergence import Answer, compare, first_difference, logprob_difference, report


def told(*logprobs: float, top: tuple[tuple[int, float], ...] = ()) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(logprob=logprob, top=top) for logprob in logprobs)


def answer(*tokens: int, logprobs: tuple[TokenLogprob, ...] = (), **fields: int) -> Answer:
    return Answer(tokens=tokens, logprobs=logprobs or told(*[-1.0] * len(tokens)), prompt_logprobs=told(-2.0), **fields)


def test_where_texts_part() -> None:
    assert first_difference([1, 2, 3], (1, 2, 3)) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [1]) == 0


def test_logprobs_of_the_same_token_are_compared() -> None:
    assert logprob_difference(told(-1.0, -2.0), told(-1.0, -2.5)) == 0.5
    assert logprob_difference((), ()) == 0.0
    # Token 7 is told by both, in whatever place; 8 and 9 by one alone.
    one, other = told(-1.0, top=((7, -1.0), (8, -9.0))), told(-1.0, top=((9, -5.0), (7, -3.0)))
    assert logprob_difference(one, other) == 2.0


def test_a_round_counts_what_parted_and_compares_what_did_not() -> None:
    alone = [answer(1, 2, 3), answer(4, 5, 6), answer(7, 8, 9)]
    others = [
        answer(1, 2, 3, logprobs=told(-1.0, -1.25, -1.0), preemptions=2),
        # Beyond the place where it parts, nothing is comparable.
        answer(4, 6, 6, logprobs=told(-1.125, -9.0, -9.0), worker_changes=1),
        answer(7, 8, 8),
    ]
    found = compare("batched", alone, others)
    assert (found.streams, found.diverged, found.tokens, found.tokens_beyond, found.earliest) == (3, 2, 9, 3, 1)
    assert (found.max_logprob_difference, found.max_prompt_logprob_difference) == (0.25, 0.0)
    assert (found.preempted, found.interrupted) == (1, 1)
    line = report([found]).splitlines()[1]
    assert line.split() == ["batched", "3", "2", "66.7%", "3", "of", "9", "1", "2.5e-01", "0.0e+00", "1", "1"]


def test_a_round_that_is_the_same_says_so() -> None:
    found = compare("alone again", [answer(1)], [answer(1)])
    assert (found.diverged, found.earliest, found.max_logprob_difference) == (0, None, 0.0)
    assert report([found]).splitlines()[1].split()[8] == "-"
