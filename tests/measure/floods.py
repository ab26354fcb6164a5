"""Health beside hostile callers: `python -m tests.measure.floods [--json] [--seconds S] [--rounds N] [PART ...]`.

One service with a content-checking worker, another caller's `Check`, and one attacker (`flood_client`). Each part runs
beside the part without an attack in the same round. Owns the order, the figures and the report.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import psutil

from tests.measure import call
from tests.measure.flood_client import ATTACKS
from tests.measure.harness import Bar, Measurement, in_ms, spread
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Rig

BAR_MS = 50.0
ALONE = "no attack"
START_SECONDS = 60.0


@contextlib.contextmanager
def _peak_mb(pid: int) -> Iterator[list[float]]:
    """Yields a list that has the largest resident memory of the process at the end of the block."""
    process, found, over = psutil.Process(pid), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            found[0] = max(found[0], process.memory_info().rss / 1e6)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def run_part(rig: Rig, address: str, pid: int, attack: str, seconds: float) -> dict[str, Any]:
    """Runs one part against the front end of this process id. Returns its figures."""
    asked: dict[str, Any] = {"address": address, "seconds": seconds}
    before, begun = cpu_seconds(pid), time.time()
    with _peak_mb(pid) as peak:
        # The attacker ends with the probe.
        probe = rig.start("probe", *call.words("flood_client.probe", **asked))
        attackers = [
            rig.start(kind, *call.words("flood_client.attack", kind=kind, **asked)) for kind in {attack} - {ALONE}
        ]
        probed = call.answer(probe, seconds + START_SECONDS)
        told = [call.answer(attacker, START_SECONDS) for attacker in attackers]
    return {
        "attack": attack,
        "checks": len(probed["waits"]),
        "failed": probed["failed"],
        "health_ms": in_ms(probed["waits"]),
        "attacker": told[0] if told else {},
        "front_end_cpu": (cpu_seconds(pid) - before) / (time.time() - begun),
        "peak_mb": peak[0],
    }


def summary(rounds: list[dict[str, dict[str, Any]]], attack: str) -> dict[str, Any]:
    """The spread of p99 over the rounds, and the median of its ratio to the part without attack."""
    each = [found[attack]["health_ms"]["p99"] for found in rounds]
    ratios = [found[attack]["health_ms"]["p99"] / found[ALONE]["health_ms"]["p99"] for found in rounds]
    return {
        "attack": attack,
        "health_p99_ms": spread(each),
        "ratio": median(ratios),
        "failed": sum(sum(found[attack]["failed"].values()) for found in rounds),
    }


def main() -> int:
    measurement = Measurement("floods")
    measurement.flag("--seconds", type=float, default=8.0, help="duration of each part")
    measurement.flag("--rounds", type=int, default=1)
    measurement.flag("parts", nargs="*", help="the attacks; default: all")
    args = measurement.begin()
    parts, rounds = [ALONE, *(args.parts or ATTACKS)], list[dict[str, dict[str, Any]]]()
    for _ in range(args.rounds):
        found: dict[str, dict[str, Any]] = {}
        for attack in parts:
            # A service of its own for each, so that one attack's memory is not another's.
            with Rig() as rig:
                rig.worker(late=False)
                scheduler = rig.scheduler("--log-level", "error")
                rig.caller(scheduler).wait_serving()
                found[attack] = run_part(rig, scheduler.address, scheduler.frontend_pid(), attack, args.seconds)
            measurement.line(found[attack])
        rounds.append(found)
    for line in [summary(rounds, attack) for attack in parts]:
        measurement.line(line)
        p99 = line["health_p99_ms"]["median"]
        measurement.bar(
            Bar(name=f"p99 of health in ms, {line['attack']}", value=p99, limit=BAR_MS),
            Bar(name=f"failed checks, {line['attack']}", value=line["failed"], limit=0),
        )
    return measurement.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
