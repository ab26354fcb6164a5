"""A request that kills, hangs or fails its workers ends alone, and is refused if it is sent again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from tandem.v1 import control_pb2
from typer.testing import CliRunner

from tandem_client.cli.__main__ import app
from tests.rigs.processes import Rig
from tests.rigs.restarting import RestartingWorkers
from tests.rigs.streams import Caller, code_of
from tests.system.asks import Ask, Sent, random_asks, send

SHAPE = ("--num-pages", "1600", "--max-rows", "64", "--max-length", "600", "--token-budget", "512", "--step-ms", "5")
CULPRIT = 281
POISON = Ask(prompt=(1, 2, CULPRIT, 3), max_new_tokens=20, request_id="poison")


@contextmanager
def poisoned(
    rig: Rig, how: str, asks: list[Ask], *, workers: int = 1
) -> Iterator[tuple[Caller, RestartingWorkers, Sent]]:
    """Serves `asks` with workers that CULPRIT kills, hangs or fails, until all streams flow."""
    scheduler = rig.scheduler("--step-timeout-seconds", "2")
    with RestartingWorkers(rig, (*SHAPE, f"--{how}-token", str(CULPRIT)), workers) as restarting:
        caller = rig.ready_caller(scheduler)
        caller.wait_load(lambda load: load.workers == workers)
        streams = send(caller, asks, tokens=3)
        yield caller, restarting, streams


def test_a_request_that_kills_its_worker_ends_alone_and_is_refused_when_it_is_sent_again(rig: Rig) -> None:
    asks = random_asks(63, seed=4, prompts=(1, 30), outputs=(100, 120))
    with poisoned(rig, "kill", asks) as (caller, restarting, streams):
        poison = caller.generate(POISON.request())
        error = poison.failed()
        assert code_of(error) == grpc.StatusCode.INTERNAL
        assert "its worker died or hung 2 times while it ran alone at token 4" in error.details()
        seen = [len(stream.transcript.tokens) for stream in streams]
        for stream, count in zip(streams, seen, strict=True):
            stream.wait_tokens(min(count + 1, 100))
        flowing = time.monotonic() - restarting.deaths[0]
        print(f"{len(restarting.deaths)} deaths; all 63 batchmates flow again {flowing:.1f} s after the first one")
        assert len(restarting.deaths) <= 8
        streams.check()
        before = len(restarting.deaths)
        again = caller.generate(Ask(prompt=POISON.prompt, max_new_tokens=20, seed=77).request()).failed()
        assert code_of(again) == grpc.StatusCode.FAILED_PRECONDITION
        assert "this request is quarantined" in again.details() and "'poison'" in again.details()
        assert len(restarting.deaths) == before
        [entry] = caller._control.ListQuarantine(control_pb2.ListQuarantineRequest()).requests
        assert entry.request_id == "poison" and len(entry.key) == 64
        assert caller._control.ClearQuarantine(control_pb2.ClearQuarantineRequest(keys=[entry.key])).removed == 1
        load = caller.wait_idle()
        assert (load.suspects, load.not_serving) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "workers", "asks", "most_deaths"),
    [
        ("kill", 2, random_asks(32, seed=5, prompts=(1, 30), outputs=(400, 500)), 8),
        ("hang", 1, random_asks(7, seed=6, prompts=(1, 30), outputs=(100, 200)), 1 + 3 + 1),
    ],
    ids=["streams of another worker flow on", "one that hangs its worker"],
)
def test_a_culprit_is_found(rig: Rig, how: str, workers: int, asks: list[Ask], most_deaths: int) -> None:
    with poisoned(rig, how, asks, workers=workers) as (caller, restarting, streams):
        error = caller.generate(POISON.request()).failed()
        assert code_of(error) == grpc.StatusCode.INTERNAL
        assert len(restarting.deaths) <= most_deaths
        streams.check()
        caller.wait_idle()


def test_a_request_whose_steps_fail_costs_its_batchmates_little(rig: Rig) -> None:
    asks = random_asks(31, seed=7, prompts=(1, 30), outputs=(60, 80))
    with poisoned(rig, "fail", asks) as (caller, restarting, streams):
        error = caller.generate(POISON.request()).failed()
        assert code_of(error) == grpc.StatusCode.INTERNAL
        assert "its step failed 2 times while it ran alone" in error.details()
        streams.check()
        assert restarting.deaths == []
        assert caller.wait_idle().lane_resets <= 1 + 5 + 1


def status_of(caller: Caller, number: int, request_id: str) -> grpc.StatusCode:
    """Sends one of the requests that make their steps fail, and returns how it ended."""
    ask = Ask(prompt=(1, number, CULPRIT), max_new_tokens=5, request_id=request_id)
    return code_of(caller.generate(ask.request()).failed())


def test_quarantined_requests_are_listed_and_cleared_by_key_and_all_together(rig: Rig) -> None:
    scheduler, _, caller = rig.serve("--fail-token", str(CULPRIT))
    runner = CliRunner(env={"TANDEM_ADDRESS": scheduler.address})

    def tandem(*arguments: str) -> list[str]:
        result = runner.invoke(app, ["quarantine", *arguments])
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return result.stdout.splitlines()

    assert tandem() == ["no request is quarantined"]
    numbers = {"first": 11, "second": 12, "third": 13}
    for name, number in numbers.items():
        assert status_of(caller, number, name) == grpc.StatusCode.INTERNAL
    lines = tandem()
    assert [line.split()[1].rstrip(",") for line in lines[::2]] == list(numbers)
    assert all("its step failed 2 times while it ran alone at token 3" in line for line in lines[1::2])
    key = lines[2].split()[0]
    assert status_of(caller, numbers["second"], "again") == grpc.StatusCode.FAILED_PRECONDITION

    assert tandem("--clear", key) == ["1 request may run again"]
    assert [line.split()[1].rstrip(",") for line in tandem()[::2]] == ["first", "third"]
    # It runs again, and is convicted again.
    assert status_of(caller, numbers["second"], "again") == grpc.StatusCode.INTERNAL
    assert status_of(caller, numbers["first"], "again") == grpc.StatusCode.FAILED_PRECONDITION
    assert tandem("--clear") == ["3 requests may run again"]
    assert tandem() == ["no request is quarantined"]
    assert status_of(caller, numbers["first"], "again") == grpc.StatusCode.INTERNAL
