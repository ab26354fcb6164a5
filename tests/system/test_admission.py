"""Admission: the queue's limits, requests that can never fit, and shutdown, without effect on running streams."""

import csv
import itertools
import os
import signal

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2

from tests.rigs.processes import Rig
from tests.rigs.streams import code_of, details_of
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.asks import Ask, answer, send
from tests.system.test_resume import LINGER

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
ASK = Ask(prompt=tuple(b"wait here"), max_new_tokens=20)
# At 12 ms per step the request holds the only row for three seconds.
BLOCKER = Ask(prompt=tuple(b"wait here"), max_new_tokens=240)


@pytest.mark.parametrize(
    ("flag", "limit", "num_waiting", "says"),
    [("--max-waiting", "3", 3, ["3"]), ("--max-waiting-tokens", "25", 2, ["18 tokens", "25"])],
)
def test_a_full_queue_refuses_with_a_retry_hint_and_admitted_streams_finish(
    rig: Rig, flag: str, limit: str, num_waiting: int, says: list[str]
) -> None:
    _, _, caller = rig.serve("--max-rows", "1", "--step-ms", "12", scheduler_flags=(flag, limit))
    blocker, streams = caller.generate(BLOCKER.request()), send(caller, [])
    blocker.wait_tokens(1)
    for _ in range(num_waiting):
        streams.send([ASK])
        streams[-1].wait_accepted()
    for _ in range(3):
        error = caller.generate(ASK.request()).failed()
        assert code_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not [each for each in says if each not in error.details()]
        assert details_of(error)["RetryInfo"].retry_delay.ToTimedelta().total_seconds() > 0
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    blocker.cancel()
    streams.check()
    caller.wait_idle()
    answer(caller, ASK)


def test_rows_stay_busy_while_requests_are_refused(rig: Rig) -> None:
    steps = rig.runtime_dir / "steps.csv"
    flags = ("--max-waiting", "4", "--steps", str(steps))
    scheduler, _, caller = rig.serve("--max-rows", "2", "--step-ms", "2", scheduler_flags=flags, late=False)
    asks = [Ask(prompt=tuple(b"ask %d" % idx), max_new_tokens=20) for idx in range(120)]
    streams = [(ask, caller.generate(ask.request())) for ask in asks]
    for _, stream in streams:
        stream._thread.join(TIMEOUT_SECONDS)
    refused = [stream.error for _, stream in streams if stream.error is not None]
    assert {code_of(error) for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0 for error in refused)
    for ask, stream in streams:
        if stream.error is None:
            ask.check(stream.result())
    assert 0 < len(refused) < len(asks)
    caller.wait_idle()
    assert scheduler.terminate() == 0
    with steps.open() as file:
        planned = [row for row in csv.DictReader(file) if int(row["output_tokens"])]
    # While the queue is full, a row is free for at most two steps: those planned before its request was known to have
    # ended.
    full = [int(row["running"]) for row in planned if int(row["waiting"]) == 4]
    assert len(full) > 5
    free = [len(list(steps)) for running, steps in itertools.groupby(full) if running < 2]
    assert max(free, default=0) <= 2


def test_a_request_that_can_never_fit_is_refused_with_its_sizes(rig: Rig) -> None:
    # 9 usable pages of 4 hold 36 positions, although max_length is 256.
    _, _, caller = rig.serve("--num-pages", "10")
    fits = Ask(prompt=tuple(b"x" * 30), max_new_tokens=7)
    answer(caller, fits)
    error = caller.generate(Ask(prompt=tuple(b"x" * 30), max_new_tokens=8).request()).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    for number in ("30", "8", "10 pages", "9"):
        assert number in error.details()
    [violation] = details_of(error)["BadRequest"].field_violations
    assert violation.field == "stop.max_new_tokens"
    # The prompt alone exceeds the pool.
    error = caller.generate(Ask(prompt=tuple(b"x" * 200), max_new_tokens=1).request()).failed()
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT
    assert "50 pages" in error.details()
    # Without max_new_tokens the request gets the tokens that fit.
    request = fits.request()
    request.stop.ClearField("max_new_tokens")
    found = caller.generate(request).result()
    assert found.accepted is not None and found.accepted.max_new_tokens == 7
    assert found.samples[0].tokens == fits.expected(0).tokens
    assert found.samples[0].reason == "CONTEXT_FULL"
    caller.wait_idle()


def test_sigterm_lets_streams_finish_on_the_next_worker(rig: Rig) -> None:
    """A drain of the service goes on over the death of its only worker, while another starts."""
    flags = ("--max-rows", "2", "--step-ms", "8")
    scheduler, worker, caller = rig.serve(*flags)
    streams = send(caller, [BLOCKER, BLOCKER, ASK, ASK])
    for stream in streams:
        stream.wait_accepted()
    streams[0].wait_tokens(1)
    scheduler.signal(signal.SIGTERM)
    caller.wait_health(NOT_SERVING)
    worker.kill()
    rig.worker(*flags)
    streams.check()
    assert scheduler.wait() == 0


def test_sigterm_ends_a_service_whose_front_end_dies_meanwhile(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--step-ms", "8")
    streams = send(caller, [BLOCKER] * 2, tokens=1)
    scheduler.signal(signal.SIGTERM)
    caller.wait_health(NOT_SERVING)
    psutil.Process(scheduler.frontend_pid()).kill()
    streams.check_lost()
    assert scheduler.wait() == 0


def test_sigterm_ends_streams_after_the_grace_time_also_those_that_lost_their_caller(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--step-ms", "10", scheduler_flags=("--grace-seconds", "0.5"))
    streams = send(caller, [Ask(prompt=(1, 2), max_new_tokens=250)] * 3, tokens=2)
    lost = caller.generate(Ask(prompt=(1, 2), max_new_tokens=250, extra=LINGER).request())
    lost.wait_tokens(3)
    lost.cancel()
    scheduler.signal(signal.SIGTERM)
    streams.check_lost()
    assert scheduler.wait() == 0


def test_sigterm_without_a_worker_stops_the_service_at_once(rig: Rig) -> None:
    scheduler = rig.scheduler()
    frontend = scheduler.frontend_pid()
    assert scheduler.terminate() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(frontend, 0)


def test_a_second_scheduler_refuses_a_runtime_directory_in_use(rig: Rig) -> None:
    first, _, caller = rig.serve()
    second = rig.launch_scheduler()
    assert second.wait() != 0
    assert str(rig.runtime_dir) in second.output()
    second.killed = True
    answer(caller, ASK)
    assert first.exit_code is None
