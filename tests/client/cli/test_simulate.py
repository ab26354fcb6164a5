"""`tandem simulate` passes everything through: flags, output, exit code."""

import json
import signal
import subprocess
import sys

import psutil
import pytest
import typer

from tandem_client.cli.commands import simulate


def tandem(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tandem_client.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_what_the_simulator_prints_comes_through() -> None:
    done = tandem("--requests", "5", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["requests"]["finished"] == 5
    assert "simulated" in done.stderr


def test_its_help_and_its_refusals_too() -> None:
    helped = tandem("--help")
    assert helped.returncode == 0 and "--find-rate" in helped.stdout
    refused = tandem("--machine", "abacus")
    assert refused.returncode == 2 and refused.stderr.startswith("error: there is no machine 'abacus'")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_it_and_leave_nothing_behind(number: signal.Signals, status: int) -> None:
    """A signal to this one process alone, as a supervisor sends it; a terminal sends SIGINT to all."""
    command = [sys.executable, "-m", "tandem_client.cli", "simulate", "--requests", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        # It simulates: its progress is told.
        process.stderr.readline()
        assert [child.cmdline() for child in psutil.Process(process.pid).children()] == []
        process.send_signal(number)
        assert process.wait(30) == status


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(simulate, "PROGRAM", "scheduler_svc_of_nobody")
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    with pytest.raises(typer.Exit) as ended:
        simulate.simulate(context)
    assert ended.value.exit_code == 1
    assert "scheduler_svc_of_nobody is not installed" in capsys.readouterr().err
