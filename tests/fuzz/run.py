"""One fuzz run over all entrances of the service. Owns the service that gRPC messages go to, and the checks after."""

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.requests import MAX_LENGTH
from tests.fuzz.calls import fuzz_method, methods
from tests.fuzz.metadata import FuzzDoor
from tests.fuzz.to_core import CoreUnderFire
from tests.fuzz.to_peers import fuzz_frontend, fuzz_worker
from tests.rigs.processes import Rig
from tests.system.asks import answer, random_asks

# Half of the frames go to the core, which has two kinds of peers.
_TO_CORE, _TO_WORKER, _TO_FRONTEND = 0.5, 0.25, 0.25
_SHAPE = (
    *("--page-size", "16", "--num-pages", "800", "--max-rows", "32", "--max-length", str(MAX_LENGTH)),
    *("--token-budget", "256"),
)


def fuzz_frames(count: int, seed: int, report: Callable[[str], None]) -> int:
    """Sends `count` frames to the parsers of core, worker and front end. Returns their number; raises on any fault."""
    # Each dropped frame is a line of the log.
    logging.disable(logging.CRITICAL)
    try:
        began = time.monotonic()
        fire = CoreUnderFire(seed)
        fire.run(int(count * _TO_CORE))
        fire.check_service()
        report(_line("frames to the core", fire.counts | {"dropped": fire.dropped}, began))
        began = time.monotonic()
        to_worker, uncovered_worker = fuzz_worker(fire.plans, int(count * _TO_WORKER), seed)
        report(_line("frames to a worker", to_worker, began))
        began = time.monotonic()
        to_frontend, uncovered_frontend = fuzz_frontend(int(count * _TO_FRONTEND), seed)
        report(_line("frames to a front end", to_frontend, began))
    finally:
        logging.disable(logging.NOTSET)
    _check_covered(count, fire.uncovered() | uncovered_worker | uncovered_frontend)
    return fire.counts["frames"] + to_worker.total() + to_frontend.total()


def fuzz_methods(count: int, seed: int, report: Callable[[str], None]) -> int:
    """Sends `count` messages to each gRPC method. Returns their number; raises AssertionError on any wrong answer."""
    total = 0
    with Rig() as rig:
        scheduler, worker, caller = rig.serve(*_SHAPE, scheduler_flags=("--log-level", "error"), late=False)
        frontend = scheduler.frontend_pid()
        for method in methods():
            outcome = fuzz_method(scheduler.address, method, count, seed)
            report(f"{outcome.method}: {count:,} messages in {outcome.seconds:.0f} s: {_shown(outcome.codes)}")
            assert not outcome.wrong, f"{outcome.method}: " + "\n".join(outcome.wrong)
            assert outcome.codes.total() == count
            _check_covered(count, outcome.uncovered)
            assert scheduler.frontend_pid() == frontend, f"{outcome.method} ended the front end"
            total += count
        for ask in random_asks(10, seed=3, prompts=(1, 60), outputs=(1, 60)):
            answer(caller, ask)
        assert caller.wait_idle().worker_pid == worker.pid
    return total


def fuzz_door(count: int, seed: int, report: Callable[[str], None]) -> int:
    """Sends `count` messages to each method over TLS, with random metadata. Returns their number.

    Raises AssertionError on any wrong answer: one for a call without the token that is not UNAUTHENTICATED.
    """
    total = 0
    with Rig() as rig, tempfile.TemporaryDirectory() as folder:
        door = FuzzDoor(Path(folder))
        rig.worker(*_SHAPE, late=False)
        scheduler = rig.scheduler(*door.service_flags, "--log-level", "error")
        scheduler.wait_line("ready: ")
        frontend = scheduler.frontend_pid()
        # All methods at once, because refusals of callers that are not known are held, and held calls wait together.
        with ThreadPoolExecutor(max_workers=len(methods())) as threads:
            calls = [threads.submit(fuzz_method, scheduler.address, method, count, seed, door) for method in methods()]
        for outcome in (call.result() for call in calls):
            report(f"{outcome.method}, TLS: {count:,} messages in {outcome.seconds:.0f} s: {_shown(outcome.codes)}")
            assert not outcome.wrong, f"{outcome.method}: " + "\n".join(outcome.wrong)
            assert outcome.codes.total() == count
            total += count
        assert scheduler.frontend_pid() == frontend, "a message ended the front end"
        assert "tandem_" not in scheduler.output()
    return total


def _check_covered(count: int, uncovered: set[str]) -> None:
    # A run of a few hundred messages cannot reach every field.
    assert count < 20_000 or not uncovered, f"no message had the fields {sorted(uncovered)}"


def _shown(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in Counter(counts).most_common())


def _line(name: str, counts: Mapping[str, int], began: float) -> str:
    return f"{name}, {time.monotonic() - began:.0f} s: {_shown(counts)}"
