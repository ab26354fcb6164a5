"""A service of real processes: scheduler, front ends, workers, and the client processes of a run.

Owns the processes and their flags. Leaving the context ends all of them.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tandem_client import Client
from tests.measure.gpu_day.clients import Completions, Fleet
from tests.measure.gpu_day.day import Day
from tests.measure.gpu_day.workloads import Requests
from tests.measure.machine import cpu_seconds
from tests.rigs.processes import Child, SchedulerProcess

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
        self._day, self._model, self._flags = day, model, worker_flags
        self._runtime_dir = day.scratch / "run"
        self._children: list[Child] = []
        arguments = ["scheduler_svc", "--runtime-dir", str(self._runtime_dir), "--listen", "127.0.0.1:0"]
        arguments += ["--frontends", str(num_frontends), "--exit-with-parent"]
        self.scheduler = SchedulerProcess("scheduler", arguments)
        self._children.append(self.scheduler)
        self._address = self.scheduler.address
        self.client = Client(self._address)

    def __enter__(self) -> "Service":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if error is not None:
            print("\n".join(child.output() for child in self._children), flush=True)
        for child in reversed(self._children):
            child.terminate()

    def start_holder(self) -> Child:
        """Starts the process that keeps the KV pools of dead workers."""
        holder = Child("holder", ["gpu_worker.holder", "--runtime-dir", str(self._runtime_dir), "--exit-with-parent"])
        self._children.append(holder)
        holder.wait_line("holds pools")
        return holder

    def launch_worker(self, environment: dict[str, str] | None = None, **more_flags: Any) -> Child:
        """Starts a worker without waiting for it."""
        given = {name.replace("_", "-"): value for name, value in {**self._flags, **more_flags}.items()}
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
        arguments = ["gpu_worker", "--model", self._model, "--runtime-dir", str(self._runtime_dir)]
        arguments += ["--device", self._day.device, *flags, "--exit-with-parent"]
        if self._day.on_cpu:
            arguments += ["--threads", "1"]
        worker = Child("worker", arguments, environment=environment)
        self._children.append(worker)
        return worker

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
        frontends = psutil.Process(self.scheduler.pid).children()
        return {
            "worker": cpu_seconds(worker.pid),
            "core": cpu_seconds(self.scheduler.pid),
            "front ends": sum(cpu_seconds(frontend.pid) for frontend in frontends),
        }


def seconds_until(child: Child, pattern: str, begun: float) -> float:
    """Waits for a line of the child. Returns the time since `begun`, on time.perf_counter's clock."""
    child.wait_line(pattern, START_SECONDS)
    return time.perf_counter() - begun


def model_flag(folder: Path | None) -> str:
    """The worker's setting `model`: a folder, or the bundled model."""
    from gpu_worker.settings import BUNDLED_MODEL

    return str(folder or BUNDLED_MODEL)
