"""Workers that die one after another without computing a token: errors, health and waiting streams."""

import signal

import grpc
from grpc_health.v1 import health_pb2

from scheduler_svc.core.lanes import DEATHS
from tests.rigs.processes import Rig
from tests.rigs.streams import code_of, details_of
from tests.system.asks import Ask

SHAPE = ("--num-pages", "64", "--max-rows", "4", "--max-length", "200")


def test_a_crash_loop_makes_health_not_serving_until_a_worker_computes_a_token(rig: Rig) -> None:
    _, worker, caller = rig.serve(*SHAPE, "--step-ms", "5")
    ask = Ask(prompt=(1, 2), max_new_tokens=150)
    stream = caller.generate(ask.request())
    stream.wait_tokens(5)
    worker.kill()
    # A worker's first step is its probation. It dies before the stream could be suspected.
    for _ in range(DEATHS - 1):
        dying = rig.worker(*SHAPE, "--exit-step", "1")
        assert dying.wait() == -signal.SIGKILL
        dying.killed = True
    caller.wait_health(health_pb2.HealthCheckResponse.NOT_SERVING)
    load = caller.load()
    assert "workers crash in a loop: 5 died within 60 s" in load.not_serving
    assert (load.workers, load.worker_lost_reason) == (0, "its connection is gone")
    error = caller.generate(Ask(prompt=(3,), max_new_tokens=2).request()).failed()
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE
    assert "workers crash in a loop" in error.details() and "RetryInfo" in details_of(error)
    rig.worker(*SHAPE)
    ask.check(stream.result())
    caller.wait_serving()
    assert caller.load().not_serving == ""
    caller.wait_idle()
