"""Runs many seeds, one after the other or in several processes.

Owns the processes. This is a module of its own because spawned processes import their function by its module's name.
"""

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from tests.rigs.resources import adapters
from tests.simulation.deaths import Deaths
from tests.simulation.episode import Episode

UPDATES_EVERY = 6
"""Every such seed also runs with updates of weights."""
DEATHS_EVERY = 4
"""Every such seed also runs over several lives of the scheduler, with this part of its operations."""

SEEDS_WITH_ADAPTERS = (0, 1)
"""The seeds, of every four, whose requests need a second kind of resource, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of one seed; `failure` is empty if every check passed."""

    seed: int
    num_handled: int
    seen: Counter[str]
    failure: str


def _run(operations: int, seed: int) -> Run:
    with adapters() if seed % 4 in SEEDS_WITH_ADAPTERS else nullcontext():
        return _run_seed(operations, seed)


def _run_seed(operations: int, seed: int) -> Run:
    episode, failure = Episode(seed, operations=operations), ""
    try:
        episode.run()
        if seed % UPDATES_EVERY == 0:
            updated = Episode(seed, operations=operations, updates=True)
            updated.run()
            episode.seen.update(updated.seen)
        if seed % DEATHS_EVERY == 0:
            deaths = Deaths(seed, operations=operations // DEATHS_EVERY)
            deaths.run()
            episode.seen.update(deaths.seen)
    except Exception:
        failure = traceback.format_exc()
    return Run(seed=seed, num_handled=episode.num_handled, seen=episode.seen, failure=failure)


@contextmanager
def runs(seeds: Iterable[int], operations: int, jobs: int) -> Iterator[Iterable[Run]]:
    """The runs of the seeds, in their order, in `jobs` processes."""
    run = partial(_run, operations)
    if jobs == 1:
        yield map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap(run, seeds)
