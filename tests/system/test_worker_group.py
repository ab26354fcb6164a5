"""A worker of two ranks: the tokens of Transformers, also when a rank dies or stops in the middle of streams.

The ranks share the bundled model over gloo. The tests share one service and run in this order; each can run alone.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from tests.rigs.processes import Child, Rig, ranks_of
from tests.system.real_service import NEAR_TIE, TIMEOUT_SECONDS, Case, Output, RealService, bundled_cases, real_service
from tests.system.test_real_model import different

# Its workers are forked by a process that has imported the compiler, which takes seconds.
pytestmark = pytest.mark.together("compiler")


@pytest.fixture(scope="module")
def served() -> Iterator[RealService]:
    with real_service(flags=["--ranks", "2"]) as service:
        yield service


def assert_equal_but_for_ties(cases: Sequence[Case], outputs: Sequence[Output]) -> None:
    ties = [case for case, output in zip(cases, outputs, strict=True) if output.tokens != case.tokens]
    for case in ties:
        assert case.margin < NEAR_TIE, f"{case.text!r} differs; its smallest margin is {case.margin:.2g}"
    print(f"{len(ties)} of {len(cases)} texts differ from a near tie on")


def test_two_ranks_compute_the_tokens_of_the_whole_model(served: RealService) -> None:
    [info] = served.client.load().per_worker
    assert (info.pid, info.device) == (served.roomy.pid, "2 x cpu")
    assert len(ranks_of(served.roomy)) == 2
    cases = bundled_cases()[::2]
    assert_equal_but_for_ties(cases, served.read(cases).result())


def test_a_group_on_one_host_listens_on_loopback_only(served: RealService) -> None:
    """Torch's stores listen on all interfaces by default."""
    launcher = psutil.Process(served.roomy.pid)
    listening = [
        connection.laddr.ip
        for process in (launcher, *launcher.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    # Gloo's.
    assert listening and set(listening) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.long),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_lost_rank_changes_no_stream(served: RealService, rank: int, how: signal.Signals) -> None:
    reading = served.read(bundled_cases()[:12])
    reading.wait_tokens(60)
    worker = served.roomy
    before = ranks_of(worker)
    num_lines = len(worker.lines)
    os.kill(before[rank].pid, how)
    begun = time.monotonic()
    worker.wait_line("joined the scheduler", TIMEOUT_SECONDS, after=num_lines)
    print(f"rank {rank}, {how.name}: serving again after {time.monotonic() - begun:.1f} s")
    assert_equal_but_for_ties(bundled_cases()[:12], reading.result())
    assert not {each.pid for each in before} & {each.pid for each in ranks_of(worker)}


@pytest.mark.long
def test_a_rank_that_stops_between_steps_is_noticed(served: RealService) -> None:
    worker = served.roomy
    num_lines = len(worker.lines)
    os.kill(ranks_of(worker)[1].pid, signal.SIGSTOP)
    begun = time.monotonic()
    worker.wait_line(r"rank 1 of 2 (was silent for 2\.\d s|hangs)", TIMEOUT_SECONDS, after=num_lines)
    print(f"noticed after {time.monotonic() - begun:.1f} s")
    assert different(bundled_cases()[:1], served.read(bundled_cases()[:1]).result()) == []


@pytest.mark.long
def test_heads_that_ranks_cannot_share_are_refused_once_with_a_hint() -> None:
    with Rig() as rig:
        flags = ["gpu_worker", "--ranks", "3", "--device", "cpu", "--runtime-dir", str(rig.runtime_dir)]
        child = Child("group", flags, environment={"OMP_NUM_THREADS": "1"})
        assert child.wait(TIMEOUT_SECONDS) == 1
        child.join_output()
        last = [line for line in child.lines if line.startswith("gpu_worker: ")]
        assert len(last) == 1 and "set ranks to a divisor of the query heads" in last[0], child.output()
