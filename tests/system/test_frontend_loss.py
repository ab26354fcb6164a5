"""The front end dies alone: its streams fail, its requests are freed, and a new one starts on the same address."""

import os
import re
import signal

from tests.rigs.processes import Rig
from tests.system.asks import random_asks, send


def test_a_killed_front_end_restarts_on_its_address_and_frees_its_requests(rig: Rig) -> None:
    scheduler, worker, caller = rig.serve("--max-rows", "4", "--max-length", "500", "--num-pages", "600")
    address = scheduler.address
    asks = random_asks(8, seed=11, prompts=(1, 30), outputs=(40, 60))
    with rig.slowed():
        streams = send(caller, asks)
        for stream in streams[:4]:
            stream.wait_tokens(2)
        number, old = len(scheduler.lines), scheduler.frontend_pid()
        os.kill(old, signal.SIGKILL)
    streams.check_lost()
    scheduler.wait_line("frontend listening on " + address, after=number)
    assert scheduler.frontend_pid() != old
    caller = rig.ready_caller(scheduler)
    load = caller.wait_idle()
    assert load.worker_pid == worker.pid
    assert load.lane_resets == 0
    # The request ids are free again, too.
    send(caller, asks).check()
    caller.wait_idle()


def test_a_front_end_that_is_asked_to_stop_is_replaced_without_alarm(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--max-rows", "4", "--max-length", "500", "--num-pages", "600")
    streams = send(caller, random_asks(4, seed=13, prompts=(1, 30), outputs=(60, 80)), tokens=5)
    number, old = len(scheduler.lines), scheduler.frontend_pid()
    os.kill(old, signal.SIGTERM)
    streams.check()
    scheduler.wait_line("the front end ended with code 0 and is restarted", after=number)
    scheduler.wait_line(f"frontend listening on {scheduler.address}", after=number)
    said = scheduler.lines[number:]
    assert [line for line in said if re.search(r" (WARNING|ERROR) ", line)] == []
    assert len([line for line in said if f"front end f-{old}-" in line and "was asked to stop" in line]) == 1


def test_a_paused_front_end_keeps_its_streams(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--max-rows", "4", "--max-length", "500", "--num-pages", "600")
    streams = send(caller, random_asks(4, seed=12, prompts=(1, 30), outputs=(80, 100)))
    streams[0].wait_tokens(5)
    frontend = scheduler.frontend_pid()
    os.kill(frontend, signal.SIGSTOP)
    os.kill(frontend, signal.SIGCONT)
    streams.check()
