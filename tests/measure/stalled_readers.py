"""Measures streams beside callers that do not read: `python -m tests.measure.stalled_readers [--readers N]`.

Rounds alternate: 12 streams alone, then 12 beside stalled readers whose output is computed and kept. Prints the median
of the ratios of a round's two times, with the least and the most. The stalled streams also use the checking worker's
time, so the ratio is above 1 on any machine.
"""

import time
from itertools import count

from tests.measure.harness import Measurement, spread
from tests.rigs.processes import Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask, random_asks, send
from tests.system.test_slow_reader import SHAPE, SMALL_WINDOW

STALLED_TOKENS = 3000


def seconds(caller: Caller, seed: int) -> float:
    """The time in which twelve streams are read."""
    asks = random_asks(12, seed=seed, prompts=(1, 30), outputs=(150, 200))
    begun = time.perf_counter()
    streams = send(caller, asks)
    for stream in streams:
        stream.result()
    return time.perf_counter() - begun


def ratios(num_readers: int, num_rounds: int) -> list[float]:
    """The time beside stalled readers over the time alone, of each round."""
    found, seeds = list[float](), count()
    with Rig() as rig:
        scheduler, _, caller = rig.serve(*SHAPE, late=False)
        stalled_caller = rig.caller(scheduler, options=SMALL_WINDOW)
        seconds(caller, next(seeds))
        for number in range(num_rounds):
            alone = seconds(caller, next(seeds))
            asks = [Ask(prompt=(number, idx), max_new_tokens=STALLED_TOKENS) for idx in range(num_readers)]
            stalled = [stalled_caller.generate(ask.request(), stalled=True) for ask in asks]
            caller.wait_load(lambda load: load.running == num_readers)
            found.append(seconds(caller, next(seeds)) / alone)
            for stream in stalled:
                stream.cancel()
            caller.wait_idle()
    return found


def main() -> int:
    """Prints the figures."""
    measurement = Measurement("stalled_readers")
    measurement.flag("--readers", type=int, default=16, help="callers that do not read")
    measurement.flag("--rounds", type=int, default=7)
    options = measurement.begin()
    found = ratios(options.readers, options.rounds)
    measurement.line({"streams": 12, "stalled_readers": options.readers, "times_as_long_as_alone": spread(found)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
