"""Tandem as a measured engine: scheduler, front end, worker and client, in processes of their own.

With one thread the worker has core 0 and everything else core 1; with two threads all share both cores. Owns the
processes of one run. Uses their command lines; the worker is `recording_worker`, which replays its plans at the end.
"""

import itertools
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.measure import call, machine
from tests.measure.machine import cpu_seconds, peak_mb, thread_seconds
from tests.measure.result import EngineResult
from tests.measure.workload import PAGE_SIZE, Workload
from tests.rigs.busy_loops import busy_loops
from tests.rigs.processes import Rig

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
    profiled: bool = False
    busy: int = 0


def run(model: Path, workload: Workload, workload_file: Path, options: Options) -> tuple[EngineResult, dict[str, Any]]:
    """Runs the workload once on processes of its own. Returns the result and the profile."""
    with Rig() as rig:
        return _Service(rig, model, workload, options).measure(workload_file)


class _Service:
    """The processes of one run."""

    def __init__(self, rig: Rig, model: Path, workload: Workload, options: Options) -> None:
        self._rig, self._options = rig, options
        self.scheduler = rig.scheduler()
        machine.place_rest(self.scheduler.pid, options.threads)
        sizes = f"--max-rows {workload.concurrent} --max-length {workload.max_length} --page-size {PAGE_SIZE}"
        flags = f"--device cpu --dtype float32 --threads {options.threads} {sizes} --exit-with-parent".split()
        own = ["--profile"] if options.profiled else []
        where = ["--model", str(model), "--runtime-dir", str(rig.runtime_dir)]
        self.preloaded = machine.tcmalloc()
        environment = {"OMP_NUM_THREADS": str(options.threads), **machine.preload(self.preloaded)}
        program = ("tests.measure.serving.recording_worker", *own, "--", *where, *flags)
        self.worker = rig.start("worker", *program, environment=environment)
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
        waited = thread_seconds(self.worker.pid, waited=True)
        asked = {"address": self.scheduler.address, "file": str(workload_file)}
        client = self._rig.start("client", *call.words("serving.tandem_client.measure", **asked))
        machine.place_rest(client.pid, self._options.threads)
        with busy_loops(self._options.busy):
            answer = call.answer(client, _RUN_SECONDS)
        waited = thread_seconds(self.worker.pid, waited=True) - waited
        used = {name: cpu_seconds(pid) - before[name] for name, pid in self.pids.items()}
        if self._options.threads == 1:
            assert os.sched_getaffinity(self.worker.pid) != os.sched_getaffinity(self.scheduler.pid)
        assert answer["cached_prompt_tokens"] == 0, "the prefix cache was used"
        peaks = {**{name: peak_mb(pid) for name, pid in self.pids.items()}, "client": answer["peak_mb"]}
        self.worker.terminate(_RUN_SECONDS)
        replayed = json.loads(self.worker.wait_line(r'^\{"recorded_worker".*\}$').group())
        preloaded = f"{Path(self.preloaded).name} preloaded" if self.preloaded else "no tcmalloc found"
        result = EngineResult(
            engine="tandem",
            note=f"{_NOTES[self._options.threads]}; {preloaded}",
            **{name: answer[name] for name in ("seconds", "tokens", "times", "submitted")},
            peak_mb=peaks,
            engine_cpu_seconds=used.pop("worker"),
            outside_cpu_seconds={**used, "client": answer["cpu_seconds"]},
            details={
                **answer["details"],
                # Seconds for which the worker was ready and its core ran others.
                "worker_kept_waiting_share": min(1.0, waited / answer["seconds"]),
                **pauses(replayed["recorded"], answer["begun"], answer["seconds"]),
                **alone(replayed["recorded"], replayed["replayed"], answer["begun"], answer["seconds"]),
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


def alone(recorded: Spans, replayed: Spans, begun: float, seconds: float) -> dict[str, float]:
    """Compares the service with its worker alone: the seconds of the client's steps in the replay of them."""
    taken = replayed[-1][1] - replayed[_first(recorded, begun)][0]
    return {"worker_alone_seconds": taken, "service_per_worker_alone": taken / seconds}


def _first(recorded: Spans, begun: float) -> int:
    return next(i for i, (at, _) in enumerate(recorded) if at >= begun)
