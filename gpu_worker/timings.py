"""Measures the time of a prompt token and of a page copy, from which the scheduler chooses how to preempt a row.

Owns the timed plans and their evaluation. Knows nothing of devices or sockets.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from gpu_worker.step.runner import Runner
from gpu_worker.step.warm_up import full_prompts_plan
from gpu_worker.wire.frames import Plan
from gpu_worker.wire.page_orders import PageOrders

log = logging.getLogger("gpu_worker.startup")
_NUM_PAGES = 8
_REPEATS = 5
# The number of full steps, which take longer and vary less.
_STEPS = 3
# Limits the time that a slow model spends on the measurement.
_MOST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Microseconds per prompt token in a full step, and per page copied to or from host memory (0 without any)."""

    token_us: float
    page_copy_us: float


def take_timings(runner: Runner, of_leader: Callable[[float], float] = lambda value: value) -> Timings:
    """Measures on a warm runner, leaves it unchanged, and logs what was found.

    of_leader: gives each rank of a group the value of its leader, so that all run the same number of steps.
    """
    timings = Timings(token_us=_token_us(runner, of_leader), page_copy_us=_page_copy_us(runner))
    log.info("a prompt takes %.3g us per token", timings.token_us)
    if runner.geometry.host_pages:
        log.info("a page copy to or from host memory takes %.3g us", timings.page_copy_us)
    return timings


def _token_us(runner: Runner, of_leader: Callable[[float], float]) -> float:
    plan = full_prompts_plan(runner.geometry)
    times: list[int] = []
    while len(times) < _STEPS and of_leader(sum(times)) < _MOST_SECONDS * 1e6:
        times += [outcome.compute_us for outcome in runner.rehearse(plan)]
    return median(times) / int(plan.chunk_counts.sum())


def _page_copy_us(runner: Runner) -> float:
    """Median over pairs of a save and a load; the pages are zero before and after.

    A GPU copies beside the measured stream. The load waits there for the copies of both plans, so the
    times of a pair together contain both directions.
    """
    count = min(_NUM_PAGES, runner.geometry.host_pages, runner.geometry.num_pages - 1)
    if not count:
        return 0.0
    pages, slots = np.arange(1, count + 1), np.arange(count)
    save = PageOrders(saved_pages=pages, saved_slots=slots)
    load = PageOrders(loaded_pages=pages, loaded_slots=slots)
    plans = [Plan(generation=0, step=i, checksum=0, page_orders=orders) for i, orders in ((1, save), (2, load))]
    # The first run touches fresh memory and is not measured.
    runner.rehearse(*plans)
    pairs = [sum(outcome.compute_us for outcome in runner.rehearse(*plans)) for _ in range(_REPEATS)]
    return median(pairs) / len(plans) / count
