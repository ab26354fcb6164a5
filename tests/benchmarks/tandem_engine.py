"""Tandem as a measured engine: scheduler, front end and client on one core, the worker alone on the other.

Owns the processes of one run. Uses only their command lines.
"""

import json
import os
import tempfile
from pathlib import Path

from tests.benchmarks.machine import ENGINE_CORE, REST_CORE, cpu_seconds, peak_mb, pin, waited_seconds
from tests.benchmarks.result import EngineResult
from tests.benchmarks.workload import PAGE_SIZE, Workload
from tests.rigs.processes import Child, SchedulerProcess

_START_SECONDS = 180.0
_RUN_SECONDS = 1800.0


def run(model: Path, workload: Workload, workload_file: Path, *, record: Path | None = None) -> EngineResult:
    """Runs the workload once on processes of its own."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as runtime_dir:
        children: list[Child] = []
        try:
            return _run(children, runtime_dir, model, workload, workload_file, record)
        except AssertionError:
            print("\n".join(child.output() for child in children))
            raise
        finally:
            for child in children:
                child.terminate()


def _run(
    children: list[Child], runtime_dir: str, model: Path, workload: Workload, workload_file: Path, record: Path | None
) -> EngineResult:
    common = ["--runtime-dir", runtime_dir]
    recording = ["--record", str(record)] if record else []
    scheduler = SchedulerProcess("scheduler", ["scheduler_svc", *common, "--listen", "127.0.0.1:0", *recording])
    children.append(scheduler)
    pin(scheduler.pid, REST_CORE)
    sizes = f"--max-rows {workload.concurrent} --max-length {workload.max_length} --page-size {PAGE_SIZE}"
    flags = f"--device cpu --dtype float32 --threads 1 {sizes}".split()
    arguments = ["gpu_worker", "--model", str(model), *common, *flags, "--exit-with-parent"]
    worker = Child("worker", arguments, environment={"OMP_NUM_THREADS": "1"})
    children.insert(0, worker)
    pin(worker.pid, ENGINE_CORE)
    worker.wait_line("joined", _START_SECONDS)
    pids = {"scheduler": scheduler.pid, "front end": scheduler.frontend_pid(), "worker": worker.pid}
    # The client's short round of 16 tokens counts in these clocks, too.
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    waited = waited_seconds(worker.pid)
    client = Child(
        "client", ["tests.benchmarks.tandem_client", "--address", scheduler.address, "--workload", str(workload_file)]
    )
    children.insert(0, client)
    pin(client.pid, REST_CORE)
    answer = json.loads(client.wait_line(r"^\{.*\}$", _RUN_SECONDS).group())
    waited = waited_seconds(worker.pid) - waited
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    assert os.sched_getaffinity(worker.pid) != os.sched_getaffinity(scheduler.pid)
    worker_seconds = used.pop("worker")
    return EngineResult(
        engine="tandem",
        note=f"whole service; worker on core {ENGINE_CORE}, scheduler, front end and client on core {REST_CORE}",
        seconds=answer["seconds"],
        tokens=answer["tokens"],
        times=answer["times"],
        peak_mb={**{name: peak_mb(pid) for name, pid in pids.items()}, "client": answer["peak_mb"]},
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
        },
    )
