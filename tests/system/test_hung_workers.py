"""Workers that hang in a step, between steps or at their first step are given up within seconds, and killed if ours."""

import signal
import time

import psutil
import pytest

from tests.rigs.processes import Child, Rig
from tests.rigs.streams import Caller
from tests.system.asks import Ask, answer, random_asks, send

SHAPE = ("--num-pages", "2048", "--max-rows", "32", "--max-length", "1024", "--token-budget", "256")
# The rig starts both programs, as `tandem serve` does, so the scheduler may kill the worker.
SUPERVISED = ("--exit-with-parent",)


def wait_killed(worker: Child) -> None:
    worker.killed = True
    assert worker.wait() == -signal.SIGKILL


def hung(caller: Caller) -> int:
    return caller.load().incidents.hung_workers


@pytest.mark.parametrize(
    "how", ["in a step", pytest.param("between steps", marks=pytest.mark.long), "at its first step"]
)
def test_a_hung_worker_is_killed_and_replaced_and_no_stream_changes(rig: Rig, how: str) -> None:
    flags = ("--hang-step", "1") if how == "at its first step" else ("--hang-step", "60") if how == "in a step" else ()
    worker = rig.worker(*SHAPE, *flags)
    scheduler = rig.scheduler(*SUPERVISED)
    caller = rig.caller(scheduler)
    asks = random_asks(8, seed=9, prompts=(1, 30), outputs=(70, 100))
    streams = []
    if how != "at its first step":
        caller.wait_serving()
    if how == "in a step":
        streams = send(caller, asks)
    elif how == "between steps":
        worker.signal(signal.SIGSTOP)
    wait_killed(worker)
    reason = caller.wait_load(lambda load: load.workers == 0).worker_lost_reason
    assert ("sent no message" if how == "between steps" else "has no result after") in reason
    rig.worker(*SHAPE)
    caller.wait_serving()
    streams = streams or send(caller, asks)
    streams.check()
    assert hung(caller) == 1
    scheduler.wait_line("killed the hung worker .*, process")


def test_a_worker_of_another_parent_is_asked_to_rejoin_and_not_killed(rig: Rig) -> None:
    # The scheduler's parent is not known to be a supervisor, because --exit-with-parent is not set.
    _, worker, caller = rig.serve(*SHAPE, scheduler_flags=("--silence-timeout-seconds", "1.5"))
    worker.signal(signal.SIGSTOP)
    caller.wait_load(lambda load: load.workers == 0)
    worker.signal(signal.SIGCONT)
    caller.wait_load(lambda load: load.workers == 1)
    assert worker.exit_code is None
    ask = Ask(prompt=(1, 2, 3), max_new_tokens=10)
    answer(caller, ask)


def test_a_frozen_scheduler_gives_up_no_worker(rig: Rig) -> None:
    scheduler, worker, caller = rig.serve(*SHAPE, "--step-ms", "20", scheduler_flags=SUPERVISED)
    ask = Ask(prompt=(1, 2, 3), max_new_tokens=60)
    stream = caller.generate(ask.request())
    stream.wait_tokens(5)
    frozen = [psutil.Process(pid) for pid in (scheduler.pid, worker.pid)]
    for process in frozen:
        process.suspend()
    # Longer than the silence that is allowed; there is nothing to wait for while both are stopped.
    time.sleep(3.5)
    for process in frozen:
        process.resume()
    scheduler.wait_line("the scheduler did not run for")
    ask.check(stream.result())
    assert hung(caller) == 0 and caller.load().lane_resets == 0


def test_steps_out_of_memory_get_smaller_and_no_stream_changes(rig: Rig) -> None:
    _, _, caller = rig.serve(*SHAPE, "--memory-tokens", "20", "--memory-rows", "5")
    streams = send(caller, random_asks(16, seed=19, prompts=(1, 60), outputs=(60, 90)))
    streams.check()
    load = caller.wait_idle()
    counts = load.incidents
    assert counts.smaller_steps and not counts.ended_for_memory
    assert load.lane_resets == counts.smaller_steps + counts.fewer_rows + counts.alone <= 40
    assert load.workers == 1
