"""One chaos run: real processes, full load, and the faults of a script drawn from a seed.

Owns the service's processes and the main loop. Every choice of a fault or a request comes from the seed; the moments at
which they meet depend on the machine.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.active_clock import ActiveClock
from tests.chaos.connections import Connection, first_load
from tests.chaos.faults import FAULTS, Fault, script_of
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load
from tests.rigs.processes import Rig
from tests.rigs.waiting import TIMEOUT_SECONDS

_NUM_CONNECTIONS = 12
_SCHEDULER_FLAGS = (
    *("--frontends", "2", "--max-waiting", "150", "--silence-timeout-seconds", "3", "--step-timeout-seconds", "3"),
    *("--log-level", "warning"),
)
_TURN_SECONDS = 0.003
# The load is read this often, for hung workers and for the end of an outage.
_LOOK_SECONDS = 0.1
_REPORT_SECONDS = 5.0
_BURST = 200
_REPLAY_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`pace` is the mean number of seconds between faults, `step_ms` the least time of a worker's step."""

    seed: int = 0
    kills: int = 500
    streams: int = 64
    workers: int = 3
    pace: float = 0.5
    step_ms: int = 2
    replay: bool = False
    """Whether the last scheduler's events are recorded and replayed with every invariant audited."""


class Chaos:
    """Use within a `Rig`; `run` raises AssertionError if the service did anything wrong."""

    def __init__(self, rig: Rig, options: Options, report: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._rig = rig
        self._options = options
        self._report = report
        self._clock = ActiveClock()
        # Each part draws from its own generator, so the choices of one do not depend on those of another.
        self._rng, loads, workers, script = (random.Random(f"{options.seed}-{part}") for part in range(4))
        self._script = script_of(script, options.kills)
        self._fleet = Fleet(rig, workers, options.workers, options.step_ms, self.counts, self._clock)
        self._fleet.keep_full()
        self._flags = (*_SCHEDULER_FLAGS, "--journal", str(rig.runtime_dir / "journal"))
        self._scheduler = rig.scheduler(*self._flags, *self._recording())
        self._address = self._scheduler.address
        self._connections = [Connection(self._address) for _ in range(_NUM_CONNECTIONS)]
        self._load = Load(self._connections, loads, options.streams, self.counts, self._clock)
        self._look_at = self._report_at = 0.0
        self._outage_pids: set[int] = set()

    def run(self) -> Counter[str]:
        """Commits every fault of the script, ends the load, and checks that nothing is left behind."""
        try:
            self._wait_serving()
            while self._script or self._fleet.hung() or self._load.outages.open_since is not None:
                if not self._script:
                    self._turn()
                    continue
                fault = self._script.pop(0)
                self._pause(self._rng.expovariate(1 / self._options.pace))
                self._commit(fault)
            self._finish()
        except BaseException:
            # A stopped worker would not end on SIGTERM.
            self._fleet.kill_all()
            raise
        finally:
            for connection in self._connections:
                connection.close()
        return self.counts

    # Faults -------------------------------------------------------------------------------------------------------

    def kill_worker(self) -> bool:
        return self._fleet.kill_in_flight()

    def stop_worker(self) -> bool:
        # Two of three workers may hang at once; the last one serves.
        return len(self._fleet.hung()) + 1 < self._options.workers and self._fleet.freeze_in_flight()

    def hang_step(self) -> bool:
        return len(self._fleet.hung()) + 1 < self._options.workers and self._fleet.hang_a_step()

    def let_worker_leave(self) -> bool:
        return self._fleet.let_one_leave()

    def kill_frontend(self) -> bool:
        if self._load.outages.open_since is not None:
            return False
        pids = self._frontends()
        if len(pids) < 2:
            return False
        self._load.outages.begin(self._clock())
        victim = self._rng.choice(sorted(pids))
        self._outage_pids = {victim}
        os.kill(victim, signal.SIGKILL)
        return True

    def kill_scheduler(self) -> bool:
        if self._load.outages.open_since is not None or not self._load.num_tokens:
            return False
        frontends = [psutil.Process(pid) for pid in self._frontends()]
        self._load.outages.begin(self._clock())
        self._scheduler.kill()
        # The next scheduler gets the address only once the front ends have noticed.
        gone, alive = psutil.wait_procs(frontends, timeout=TIMEOUT_SECONDS)
        assert not alive, f"front ends outlive their scheduler: {alive}"
        self._check_output()
        self._scheduler = self._rig.launch_scheduler(*self._flags, *self._recording(), listen=self._address)
        self._outage_pids = {process.pid for process in gone}
        return True

    def overload(self) -> bool:
        if self._load.outages.open_since is not None:
            return False
        self._load.burst(_BURST)
        self.counts["requests of overloads"] += _BURST
        return True

    def send_poison(self) -> bool:
        self._load.send_poison()
        return True

    # The main loop ------------------------------------------------------------------------------------------------

    def _commit(self, fault: Fault) -> None:
        limit = self._clock() + TIMEOUT_SECONDS
        while not fault.commit(self):
            self._turn()
            assert self._clock() < limit, f"no moment for one of the {fault.name} in {TIMEOUT_SECONDS:g} s"
        self.counts[fault.name] += 1

    def _pause(self, seconds: float) -> None:
        until = self._clock() + seconds
        while self._clock() < until:
            self._turn()

    def _turn(self, *, open_new: bool = True) -> None:
        time.sleep(_TURN_SECONDS)
        now = self._clock()
        assert self._scheduler.exit_code is None, f"the scheduler ended by itself\n{self._scheduler.output()}"
        self._load.turn(open_new=open_new)
        self._fleet.keep_full()
        if now >= self._look_at and (self._fleet.hung() or self._load.outages.open_since is not None):
            self._look_at = now + _LOOK_SECONDS
            self._look(now)
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._report(self.line())

    def _look(self, now: float) -> None:
        load = first_load(self._connections)
        if load is None:
            return
        is_outage = self._load.outages.open_since is not None
        self._repeat(self._fleet.settle_hung({worker.pid for worker in load.per_worker}, counts=not is_outage))
        if not is_outage:
            return
        num_new = len(self._frontends() - self._outage_pids)
        # Each connection stays with its front end as long as that lives.
        if num_new == 2 and load.workers and all(connection.is_served() for connection in self._connections):
            self._load.outages.end(now)

    def _repeat(self, hangs: list[str]) -> None:
        """Plans hangs again that the scheduler could not notice, because it was killed before."""
        for hang in hangs:
            [fault] = [fault for fault in FAULTS if fault.name == f"workers {hang} in a step"]
            self.counts[fault.name] -= 1
            self._script.append(fault)

    def line(self) -> str:
        """The counts so far, those of faults first."""
        counts = self.counts
        return (
            f"{self._clock():4.0f} s: {counts['kills of workers with a plan in flight']} kills,"
            f" {counts['hangs']} hangs, {counts['front-end deaths']} front-end and"
            f" {counts['scheduler deaths']} scheduler deaths; {counts['streams equal to the oracle']} streams equal"
        )

    # Start and end ------------------------------------------------------------------------------------------------

    def _wait_serving(self) -> None:
        limit = self._clock() + TIMEOUT_SECONDS
        while (load := first_load(self._connections)) is None or load.workers < self._options.workers:
            assert self._clock() < limit, f"the service does not serve\n{self._scheduler.output()}"
            time.sleep(0.05)
        # Both front ends have yet to learn of the workers.
        self._load.outages.begin(self._clock())

    @property
    def _record(self) -> Path:
        return self._rig.runtime_dir / "record"

    def _recording(self) -> Sequence[str]:
        """The flags by which the next scheduler records its events, in place of those of the last one."""
        self._record.unlink(missing_ok=True)
        return ("--record", str(self._record)) if self._options.replay else ()

    def replay(self) -> None:
        """Stops the scheduler and replays its events."""
        assert self._scheduler.terminate() == 0
        self._rig.check_record(self._record, _REPLAY_SECONDS, audited=True)

    def _frontends(self) -> set[int]:
        found: set[int] = set()
        for child in psutil.Process(self._scheduler.pid).children():
            try:
                if "scheduler_svc.frontend" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def _check_output(self) -> None:
        self._scheduler.join_output()
        output = self._scheduler.output()
        assert "Traceback" not in output, output
        self._rig.children.remove(self._scheduler)

    def _finish(self) -> None:
        """Lets open streams end, and checks that the service is idle and holds no page."""
        limit = self._clock() + TIMEOUT_SECONDS
        while self._load.flights or self._fleet.hung() or self._load.outages.open_since is not None:
            self._turn(open_new=False)
            assert self._clock() < limit, f"{len(self._load.flights)} streams still run"
        for request_id in self._load.orphans:
            self._connections[0].abort(request_id)
        while True:
            load = first_load(self._connections)
            if load is not None and load.running == load.waiting == load.pages_used == 0:
                break
            assert self._clock() < limit, f"the service is not idle:\n{load}"
            time.sleep(0.05)
        assert self._rig.violations() == [], "\n".join(self._rig.violations())


def chaos(options: Options, report: Callable[[str], None]) -> Counter[str]:
    """Runs until every fault of the script has happened. Raises AssertionError if the service did anything wrong."""
    with Rig() as rig:
        scene = Chaos(rig, options, report)
        counts = scene.run()
        report(scene.line())
        if options.replay:
            scene.replay()
        return counts
