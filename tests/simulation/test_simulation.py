"""200,000 operations of fixed seeds; `python -m tests.simulation` goes on where they end."""

from collections import Counter

import pytest

from tests.simulation.episode import Episode

_SEEDS_EACH = 20
# What the lives must have met, each of them often enough to be more than luck.
_SEEN: Counter[str] = Counter()


@pytest.mark.parametrize("first", range(0, 200, _SEEDS_EACH))
def test_random_lives(first: int) -> None:
    for seed in range(first, first + _SEEDS_EACH):
        episode = Episode(seed)
        episode.run()
        _SEEN.update(episode.seen)
