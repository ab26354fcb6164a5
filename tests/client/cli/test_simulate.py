"""`tandem simulate` passes flags, output, signals and the exit code through."""

import json
import signal
import subprocess

import psutil
import pytest
import typer

from tandem_client.cli.commands import local as simulate
from tests.rigs.processes import popen, run
from tests.rigs.waiting import TIMEOUT_SECONDS


def tandem(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("tandem_client.cli", "simulate", *arguments)


def test_simulate_prints_the_output_of_the_simulator() -> None:
    done = tandem("--requests", "5", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["requests"]["finished"] == 5
    assert "simulated" in done.stderr


def test_simulate_prints_the_help_and_the_errors_of_the_simulator() -> None:
    helped = tandem("--help")
    assert helped.returncode == 0 and "--find-rate" in helped.stdout
    refused = tandem("--machine", "abacus")
    assert refused.returncode == 2 and refused.stderr.startswith("error: --machine is 'abacus'")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_the_simulator_and_end_it(number: signal.Signals, status: int) -> None:
    """The signal goes to one process only, as a supervisor sends it; a terminal sends SIGINT to all."""
    command = ["tandem_client.cli", "simulate", "--requests", "1000000"]
    with popen(*command, stderr=subprocess.PIPE, start_new_session=True, text=True) as process:
        assert process.stderr is not None
        # The simulation has begun, because its progress is printed.
        process.stderr.readline()
        assert [child.cmdline() for child in psutil.Process(process.pid).children()] == []
        process.send_signal(number)
        assert process.wait(TIMEOUT_SECONDS) == status


def test_simulate_without_a_checkout_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "PROGRAM", "no_such_scheduler_svc")
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    with pytest.raises(typer.Exit) as ended:
        simulate.simulate(context)
    assert ended.value.exit_code == 1
    assert "no_such_scheduler_svc is not installed" in capsys.readouterr().err
