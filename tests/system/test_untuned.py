"""With `--grpc-tuning off` front ends use no private parts of gRPC; they still answer, cancel and outlive callers."""

import os
import subprocess
import sys
from collections import Counter

import grpc
import psutil
from grpc_health.v1 import health_pb2

from tests.rigs.processes import REPOSITORY, Rig, SchedulerProcess, child_environment
from tests.rigs.streams import code_of
from tests.system.asks import Ask, answer, random_asks, send
from tests.system.conftest import Served

LONG = Ask(prompt=tuple(b"a long one"), max_new_tokens=4000)
SHAPE = ("--max-rows", "8", "--num-pages", "2048", "--max-length", "4096")
# Prints a line for its first token, and reads on.
CALLER = """
import sys
from tandem_client import Client
for _ in Client(sys.argv[1]).generate([1, 2, 3], max_new_tokens=4000, ignore_eos=True):
    print("token", flush=True)
"""


def policies(scheduler: SchedulerProcess) -> Counter[int]:
    """How the kernel schedules the threads of the front end: gRPC's get SCHED_BATCH, if it is tuned."""
    return Counter(os.sched_getscheduler(thread.id) for thread in psutil.Process(scheduler.frontend_pid()).threads())


def test_an_untuned_front_end_answers_cancels_and_outlives_its_callers(rig: Rig) -> None:
    scheduler, _, caller = rig.serve(*SHAPE, scheduler_flags=("--grpc-tuning", "off"))
    streams = send(caller, random_asks(8, seed=21, prompts=(1, 30), outputs=(30, 60)))
    streams.check()
    cancelled = caller.generate(LONG.request())
    command = [sys.executable, "-c", CALLER, scheduler.address]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY, env=child_environment())
    try:
        cancelled.wait_tokens(5)
        assert killed.stdout is not None and killed.stdout.readline() == b"token\n"
        assert caller.load().running == 2
        assert caller.health() == health_pb2.HealthCheckResponse.SERVING
        cancelled.cancel()
        assert code_of(cancelled.failed()) == grpc.StatusCode.CANCELLED
        caller.wait_load(lambda load: load.running == 1)
    finally:
        killed.kill()
        killed.communicate()
    # Pages and rows of both are free.
    caller.wait_idle()
    assert caller.health() == health_pb2.HealthCheckResponse.SERVING
    ask = random_asks(1, seed=22, prompts=(1, 30), outputs=(30, 60))[0]
    answer(caller, ask)
    assert set(policies(scheduler)) == {os.SCHED_OTHER}
    assert not any("grpc tuning" in line for line in scheduler.lines)


def test_a_tuned_front_end_has_patient_threads(served: Served) -> None:
    """What the other test looks at can be seen."""
    assert policies(served.scheduler)[os.SCHED_BATCH] > 0
