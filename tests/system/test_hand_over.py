"""`tandem drain` under traffic: a worker or the service leaves in order, and no stream ends early."""

import json
import signal
import subprocess

import grpc
import pytest

from tests.rigs.processes import Rig, run
from tests.rigs.streams import code_of, details_of
from tests.system.asks import random_asks, send

NOT_SERVING = 2
SHAPE = ("--page-size", "16", "--num-pages", "1024", "--max-rows", "32", "--max-length", "1024")


def drain(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("tandem_client.cli", "drain", "--json", "--address", address, *arguments)


@pytest.mark.parametrize("is_standby", [False, True])
def test_another_worker_takes_over_from_a_drained_one(rig: Rig, is_standby: bool) -> None:
    scheduler, old, caller = rig.serve(*SHAPE)
    with rig.slowed():
        streams = send(caller, random_asks(12, seed=11, prompts=(1, 60), outputs=(60, 90)), tokens=1)
        new = rig.worker(*SHAPE, *(["--standby"] if is_standby else []))
        caller.wait_load(lambda load: load.standby_workers == 1 if is_standby else load.workers == 2)
        done = drain(scheduler.address, str(old.pid))
    assert done.returncode == 0, done.stderr
    progress = [json.loads(line) for line in done.stdout.splitlines()]
    assert progress[-1]["state"] == "done" and progress[-1]["moved"] > 0
    assert old.wait() == 0
    streams.check()
    assert [worker.pid for worker in caller.load().per_worker] == [new.pid]
    assert scheduler.terminate() == 0


def test_a_drain_of_the_service_lets_streams_end_and_stops_it(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE)
    asks = random_asks(4, seed=2, prompts=(1, 40), outputs=(60, 90))
    with rig.slowed():
        streams = send(caller, asks, tokens=1)
        draining = rig.start("drain", "tandem_client.cli", "drain", "--address", scheduler.address)
        caller.wait_health(NOT_SERVING)
        error = caller.generate(asks[0].request()).failed()
        assert code_of(error) == grpc.StatusCode.UNAVAILABLE and details_of(error)
        # The signal that follows a preStop hook does not cut the drain short.
        scheduler.signal(signal.SIGTERM)
    streams.check()
    assert draining.wait() == 0
    draining.join_output()
    assert " done " in draining.lines[-1] and "draining" in draining.lines[0]
    assert scheduler.wait() == 0


def test_the_last_worker_and_an_unknown_one_are_refused(rig: Rig) -> None:
    record = rig.runtime_dir / "record.bin"
    scheduler, worker, caller = rig.serve(*SHAPE, scheduler_flags=("--record", str(record)))
    last, unknown = drain(scheduler.address, str(worker.pid)), drain(scheduler.address, "zebra")
    assert last.returncode == 2 and "only worker" in last.stderr
    assert unknown.returncode == 2 and "zebra" in unknown.stderr
    assert caller.load().workers == 1
    forced = drain(scheduler.address, str(worker.pid), "--force")
    assert forced.returncode == 0 and worker.wait() == 0
    assert scheduler.terminate() == 0
    rig.check_record(record, audited=True)
