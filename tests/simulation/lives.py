"""Many lives, one after the other or in several processes at once.

Owns the processes. A module of its own, since processes that are started import what they run by its name.
"""

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tests.simulation.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What became of a seed; `failure` is empty where all promises held."""

    seed: int
    num_handled: int
    seen: Counter[str]
    failure: str


def _live(operations: int, seed: int) -> Life:
    episode, failure = Episode(seed, operations=operations), ""
    try:
        episode.run()
    except Exception:
        failure = traceback.format_exc()
    return Life(seed=seed, num_handled=episode.num_handled, seen=episode.seen, failure=failure)


@contextmanager
def lives(seeds: Iterable[int], operations: int, jobs: int) -> Iterator[Iterable[Life]]:
    """The lives of the seeds, in their order; `jobs` processes live them."""
    live = partial(_live, operations)
    if jobs == 1:
        yield map(live, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap(live, seeds)
