"""A fixed set of seeds; `python -m tests.simulation` goes on where it ends."""

import pytest

from tests.simulation.episode import Episode


@pytest.mark.parametrize("first", range(0, 150, 10))
def test_ten_random_lives(first: int) -> None:
    for seed in range(first, first + 10):
        Episode(seed).run()
