"""Tandem as a measured engine: scheduler, front end, worker and client, in processes of their own.

With one thread the worker has core 0 and everything else core 1; with two threads all share both cores. Owns the
processes of one run. Uses their command lines; the worker is `recording_worker`, which replays its plans at the end.
"""

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.measure import machine
from tests.measure.machine import cpu_seconds, peak_mb, waited_seconds
from tests.measure.result import EngineResult
from tests.measure.workload import PAGE_SIZE, Workload
from tests.rigs.busy_loops import busy_loops
from tests.rigs.processes import Child, SchedulerProcess

_START_SECONDS = 180.0
_RUN_SECONDS = 1800.0
_NOTES = {
    1: f"whole service; worker on core {machine.ENGINE_CORE} with one thread, scheduler, front end and client on core "
    f"{machine.REST_CORE}",
    2: "whole service; worker with two threads, scheduler, front end and client share two cores",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the service is run. `profiled`: the worker profiles its plans at the end. `busy`: loops beside the client."""

    threads: int = 1
    replays: int = 1
    profiled: bool = False
    busy: int = 0


def run(
    model: Path, workload: Workload, workload_file: Path, options: Options | None = None, *, record: Path | None = None
) -> tuple[EngineResult, dict[str, Any]]:
    """Runs the workload once on processes of its own. Returns the result and the profile."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as runtime_dir:
        children: list[Child] = []
        try:
            service = _Service(children, runtime_dir, model, workload, options or Options(), record)
            return service.measure(workload_file)
        except AssertionError:
            print("\n".join(child.output() for child in children))
            raise
        finally:
            for child in children:
                child.terminate(_RUN_SECONDS)


class _Service:
    """The processes of one run."""

    def __init__(
        self,
        children: list[Child],
        runtime_dir: str,
        model: Path,
        workload: Workload,
        options: Options,
        record: Path | None,
    ) -> None:
        self._children, self._options = children, options
        common = ["--runtime-dir", runtime_dir]
        recording = ["--record", str(record)] if record else []
        flags = ["scheduler_svc", *common, "--listen", "127.0.0.1:0", *recording]
        self.scheduler = SchedulerProcess("scheduler", flags)
        children.append(self.scheduler)
        machine.place_rest(self.scheduler.pid, options.threads)
        sizes = f"--max-rows {workload.concurrent} --max-length {workload.max_length} --page-size {PAGE_SIZE}"
        flags = f"--device cpu --dtype float32 --threads {options.threads} {sizes}".split()
        own = ["--replays", str(options.replays), *(["--profile"] if options.profiled else [])]
        program = ["tests.measure.serving.recording_worker", *own, "--", "--model", str(model)]
        self.preloaded = machine.tcmalloc()
        environment = {"OMP_NUM_THREADS": str(options.threads), **machine.preload(self.preloaded)}
        self.worker = Child("worker", [*program, *common, *flags, "--exit-with-parent"], environment=environment)
        children.insert(0, self.worker)
        machine.place_engine(self.worker.pid, options.threads)
        self.worker.wait_line("joined", _START_SECONDS)
        self.pids = {
            "scheduler": self.scheduler.pid,
            "front end": self.scheduler.frontend_pid(),
            "worker": self.worker.pid,
        }

    def measure(self, workload_file: Path) -> tuple[EngineResult, dict[str, Any]]:
        # The client's short round of 16 tokens counts in these clocks, too.
        before = {name: cpu_seconds(pid) for name, pid in self.pids.items()}
        waited = waited_seconds(self.worker.pid)
        arguments = ["--address", self.scheduler.address, "--workload", str(workload_file)]
        client = Child("client", ["tests.measure.serving.tandem_client", *arguments])
        self._children.insert(0, client)
        machine.place_rest(client.pid, self._options.threads)
        with busy_loops(self._options.busy):
            answer = json.loads(client.wait_line(r"^\{.*\}$", _RUN_SECONDS).group())
        waited = waited_seconds(self.worker.pid) - waited
        used = {name: cpu_seconds(pid) - before[name] for name, pid in self.pids.items()}
        if self._options.threads == 1:
            assert os.sched_getaffinity(self.worker.pid) != os.sched_getaffinity(self.scheduler.pid)
        assert answer["cached_prompt_tokens"] == 0, "the prefix cache was used"
        peaks = {**{name: peak_mb(pid) for name, pid in self.pids.items()}, "client": answer["peak_mb"]}
        self.worker.terminate(_RUN_SECONDS)
        replayed = json.loads(self.worker.wait_line(r'^\{"recorded_worker".*\}$').group())
        worker_seconds = used.pop("worker")
        preloaded = f"{Path(self.preloaded).name} preloaded" if self.preloaded else "no tcmalloc found"
        result = EngineResult(
            engine="tandem",
            note=f"{_NOTES[self._options.threads]}; {preloaded}",
            seconds=answer["seconds"],
            tokens=answer["tokens"],
            times=answer["times"],
            submitted=answer["submitted"],
            peak_mb=peaks,
            engine_cpu_seconds=worker_seconds,
            outside_cpu_seconds={**used, "client": answer["cpu_seconds"]},
            details={
                "steps": answer["steps"],
                "step_ms": answer["step_ms"],
                "worker_busy_share": min(1.0, worker_seconds / answer["seconds"]),
                # Seconds for which the worker was ready and its core ran others.
                "worker_kept_waiting_share": min(1.0, waited / answer["seconds"]),
                "preemptions": answer["preemptions"],
                "lane_resets": answer["lane_resets"],
                "workers_given_up": answer["workers_given_up"],
                **pauses(replayed["recorded"], answer["begun"], answer["seconds"]),
                **alone(replayed["recorded"], replayed["replays"], answer["begun"], answer["seconds"]),
            },
        )
        return result, replayed.get("profile", {})


Spans = Sequence[Sequence[float]]


def pauses(recorded: Spans, begun: float, seconds: float) -> dict[str, float]:
    """Returns the time of the client's steps, and of the pauses before, between and after them.

    recorded: (begin, end) of each step in the service. begun, seconds: the client's.
    """
    steps = recorded[_first(recorded, begun) :]
    return {
        "in_steps_seconds": sum(end - begin for begin, end in steps),
        "between_steps_us": 1e6 * statistics.median([b[0] - a[1] for a, b in itertools.pairwise(steps)] or [0.0]),
        "before_first_step_ms": 1e3 * (steps[0][0] - begun),
        "after_last_step_ms": 1e3 * (begun + seconds - steps[-1][1]),
    }


def alone(recorded: Spans, replays: Sequence[Spans], begun: float, seconds: float) -> dict[str, float]:
    """Compares the service with its worker alone: the seconds of the client's steps in a replay of them.

    replays: (begin, end) of each step, by replay; the median counts. Returns nothing without replays.
    """
    first = _first(recorded, begun)
    taken = [spans[-1][1] - spans[first][0] for spans in replays]
    if not taken:
        return {}
    return {
        "worker_alone_seconds": statistics.median(taken),
        "service_per_worker_alone": statistics.median(taken) / seconds,
    }


def _first(recorded: Spans, begun: float) -> int:
    return next(i for i, (at, _) in enumerate(recorded) if at >= begun)
