"""Constraints through the service, with the checking worker's toy matcher: equal text over kills, and failures."""

import random
import time
from dataclasses import replace

import pytest

from tests.rigs.processes import Rig
from tests.rigs.streams import Stream
from tests.system.asks import Ask, random_asks

SHAPE = ("--num-pages", "2048", "--max-rows", "32", "--max-length", "1024", "--token-budget", "256")


def lark(words: str) -> str:
    """A grammar of any text, with words for the toy matcher."""
    return f"start: /(.|\\n)*/ // {words}"


def _total(streams: list[Stream]) -> int:
    return sum(len(stream.transcript.tokens) for stream in streams)


def constrained(count: int, *, seed: int, complete: tuple[int, int]) -> list[Ask]:
    """Requests, three of four with one of a few constraints."""
    rng = random.Random(seed)
    asks = random_asks(count, seed=seed, prompts=(1, 600), outputs=(350, 400))
    return [
        replace(ask, ignore_eos=False, lark=lark(f"{rng.randrange(3)} toy_complete={rng.randint(*complete)}"))
        if rng.random() < 0.75
        else ask
        for ask in asks
    ]


@pytest.mark.parametrize("num_kills", [5, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_kills_change_no_constrained_stream(rig: Rig, num_kills: int) -> None:
    rng = random.Random(num_kills)
    workers = [rig.worker(*SHAPE), rig.worker(*SHAPE)]
    caller = rig.caller(rig.scheduler())
    caller.wait_serving()
    asks = constrained(8 + 4 * num_kills, seed=num_kills, complete=(100, 300))
    streams = [caller.generate(ask.request()) for ask in asks[:8]]
    for _ in range(num_kills):
        target = _total(streams) + rng.randrange(1, 100)
        for _ in range(5_000):
            if _total(streams) >= target or all(stream.ended for stream in streams):
                break
            time.sleep(0.001)
        num_missing = max(0, 6 - sum(not stream.ended for stream in streams))
        streams += [caller.generate(ask.request()) for ask in asks[len(streams) : len(streams) + num_missing]]
        assert len(streams) < len(asks), "too few requests were prepared"
        rig.kill_serving(caller, workers)
        workers.append(rig.worker(*SHAPE))
    for ask, stream in zip(asks, streams, strict=False):
        ask.check(stream.result(120))
    assert caller.wait_idle().lane_resets >= num_kills
