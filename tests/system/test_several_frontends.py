"""Several front ends on one port: connections spread over them, and the loss of one affects its own callers only."""

import os
import signal

import grpc
import psutil
from tandem.v1 import control_pb2
from tandem.v1 import inference_pb2 as pb

from tests.rigs.processes import Rig, SchedulerProcess
from tests.rigs.streams import Caller, code_of
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask, answer, random_asks, send

SHAPE = ("--max-rows", "8", "--max-length", "500", "--num-pages", "900")
# All these connections reach the same one of two front ends once in 2^31 runs.
MOST_CALLERS = 32


def frontend_pids(scheduler: SchedulerProcess) -> set[int]:
    return {each.pid for each in scheduler.frontends()}


def connections(pids: set[int], port: int) -> dict[int, int]:
    """The callers' ports, each with the process id of its front end."""
    return {
        one.raddr.port: pid
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.laddr.port == port and one.raddr and one.status == psutil.CONN_ESTABLISHED
    }


def spread(rig: Rig, scheduler: SchedulerProcess, pids: set[int]) -> dict[int, Caller]:
    """Opens connections until each front end has one; returns a serving caller for each."""
    port = int(scheduler.address.rpartition(":")[2])
    callers: dict[int, Caller] = {}
    before = connections(pids, port)
    for _ in range(MOST_CALLERS):
        caller = rig.ready_caller(scheduler)
        after = connections(pids, port)
        [pid] = [after[new] for new in after.keys() - before.keys()]
        callers.setdefault(pid, caller)
        if callers.keys() == pids:
            return callers
        before = after
    raise AssertionError(f"{MOST_CALLERS} connections reached {callers.keys()} of {pids}")


def long_asks(count: int, seed: int) -> list[Ask]:
    return random_asks(count, seed=seed, prompts=(1, 30), outputs=(300, 400))


def test_a_killed_front_end_restarts_and_the_other_keeps_its_streams(rig: Rig) -> None:
    rig.worker(*SHAPE)
    scheduler = rig.scheduler("--frontends", "2")
    pids = frontend_pids(scheduler)
    assert len(pids) == 2
    callers = spread(rig, scheduler, pids)
    dying, living = sorted(pids)
    asks = {pid: long_asks(3, seed=pid % 1000) for pid in pids}
    streams = {pid: send(callers[pid], asks[pid]) for pid in pids}
    for of_one in streams.values():
        of_one[0].wait_tokens(5)
    number = len(scheduler.lines)
    os.kill(dying, signal.SIGKILL)
    for stream in streams[dying]:
        assert code_of(stream.failed()) == grpc.StatusCode.UNAVAILABLE
    # Both front ends listen at the address of the first start again.
    scheduler.wait_line(f"frontend listening on {scheduler.address}$", after=number)
    scheduler.wait_line(r"front end [12] of 2 ended with code -9 and is restarted", after=number)
    back = frontend_pids(scheduler)
    assert living in back
    assert dying not in back
    assert len(back) == 2
    streams[living].check()
    # The requests and ids of the dead front end are freed, and callers reach its successor.
    callers[living].wait_idle()
    [new] = back - {living}
    caller = spread(rig, scheduler, back)[new]
    for ask in random_asks(3, seed=5, prompts=(1, 30), outputs=(1, 20)):
        answer(caller, ask)


def test_front_ends_share_request_ids_and_the_prefix_cache(rig: Rig) -> None:
    rig.worker(*SHAPE, "--step-ms", "2")
    scheduler = rig.scheduler("--frontends", "2")
    pids = frontend_pids(scheduler)
    first, second = spread(rig, scheduler, pids).values()
    [ask] = long_asks(1, seed=3)
    request = ask.request()
    request.request_id = "mine"
    stream = first.generate(request)
    stream.wait_tokens(3)
    again = second.generate(request)
    assert code_of(again.failed()) == grpc.StatusCode.ALREADY_EXISTS
    assert second.load().running == first.load().running == 1
    assert second.abort("mine", "unknown") == [
        control_pb2.ABORT_OUTCOME_ABORTED,
        control_pb2.ABORT_OUTCOME_NOT_FOUND,
    ]
    assert stream.result().finished.reason == pb.FINISH_REASON_ABORTED
    # The id is free again at both front ends.
    answer(second, Ask(prompt=(1, 2, 3), max_new_tokens=4, request_id="mine"))
    # Both front ends hash pages with one root, so a prompt sent through one hits the pages cached through the other.
    shared = Ask(prompt=tuple(i % 100 for i in range(300)), max_new_tokens=4)
    for caller, kept in ((first, 0), (second, 296)):
        assert answer(caller, shared).summary.usage.cached_prompt_tokens == kept


def test_sigterm_stops_all_front_ends_after_their_streams(rig: Rig) -> None:
    rig.worker(*SHAPE, "--step-ms", "2")
    scheduler = rig.scheduler("--frontends", "2")
    pids = frontend_pids(scheduler)
    callers = spread(rig, scheduler, pids)
    asks = {pid: random_asks(1, seed=pid % 1000, prompts=(1, 30), outputs=(100, 120))[0] for pid in pids}
    streams = {pid: callers[pid].generate(asks[pid].request()) for pid in pids}
    for stream in streams.values():
        stream.wait_tokens(3)
    scheduler.signal(signal.SIGTERM)
    for pid, stream in streams.items():
        asks[pid].check(stream.result())
    assert scheduler.wait() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    ready = [line for line in scheduler.lines if "frontend listening on " in line]
    assert len(ready) == 1


def test_a_second_service_cannot_listen_on_the_port(rig: Rig) -> None:
    scheduler = rig.scheduler("--frontends", "2")
    with Rig() as other:
        late = other.launch_scheduler("--frontends", "2", listen=scheduler.address)
        # The exit code 2 is expected here; `killed` exempts it from the rig's check.
        late.killed = True
        assert late.wait(TIMEOUT_SECONDS) == 2
        late.wait_line(f"cannot listen on {scheduler.address}$")
    assert len(frontend_pids(scheduler)) == 2
