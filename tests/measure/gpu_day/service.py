"""A service of real processes: scheduler, front ends, workers, and the client processes of a run.

Owns the processes and their flags. Leaving the context ends all of them.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_client import Client
from tests.measure.gpu_day.clients import Completions, Fleet
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.workloads import Requests
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child, Rig

# Start-up with a cold compile cache.
START_SECONDS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a workload through the service, and what the processes spent on it."""

    completions: Completions
    # CPU seconds of the worker, the core, the front ends and the clients.
    cpu_seconds: dict[str, float]
    steps: int
    preemptions: int


class Service:
    """One scheduler and any number of workers of one model."""

    def __init__(self, day: Day, model: str, *, num_frontends: int, **worker_flags: Any) -> None:
        """worker_flags: settings of the worker, as max_rows=256."""
        self._day, self._model, self._flags, self.rig = day, model, worker_flags, Rig()
        self.scheduler = self.rig.scheduler("--frontends", str(num_frontends), "--exit-with-parent")
        self._address = self.scheduler.address
        self.client = Client(self._address)

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        self.rig.__exit__(*error)

    def launch_worker(self, environment: dict[str, str] | None = None, **more_flags: Any) -> Child:
        """Starts a worker without waiting for it."""
        given = {"model": self._model, "runtime-dir": self.rig.runtime_dir, "device": self._day.device}
        given |= {"exit-with-parent": True} | ({"threads": 1} if self._day.on_cpu else {})
        given |= {name.replace("_", "-"): value for name, value in {**self._flags, **more_flags}.items()}
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
        return self.rig.start("worker", "gpu_worker", *flags, environment=environment)

    def start_worker(self) -> Child:
        """Starts a worker and waits until it has joined."""
        worker = self.launch_worker()
        worker.wait_line("joined", START_SECONDS)
        return worker

    def fleet(self, requests: Requests, *, num_processes: int) -> Fleet:
        """Connected clients for the requests, none of which finds its prompt in the cache."""
        folder = Path(tempfile.mkdtemp(prefix="clients-", dir=self._day.scratch))
        fleet = Fleet(self._address, requests, folder, num_processes=num_processes)
        # An earlier run has left the same prompts.
        self.client.flush_cache()
        return fleet

    def run(self, requests: Requests, worker: Child, *, num_processes: int) -> Run:
        """Runs the requests once, all submitted at one moment."""
        fleet = self.fleet(requests, num_processes=num_processes)
        try:
            before, clocks = self.client.load(), self._clocks(worker)
            fleet.start()
            completions = fleet.result(max(20.0, self._day.seconds_left()))
            spent = {name: seconds - clocks[name] for name, seconds in self._clocks(worker).items()}
            after = self.client.load()
        finally:
            fleet.end()
        return Run(
            completions=completions,
            cpu_seconds={**spent, "clients": completions.cpu_seconds},
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
        )

    def _clocks(self, worker: Child) -> dict[str, float]:
        return {
            "worker": cpu_seconds(worker.pid),
            "core": cpu_seconds(self.scheduler.pid),
            "front ends": sum(cpu_seconds(frontend.pid) for frontend in self.scheduler.frontends()),
        }
