"""`tandem simulate` passes everything through: flags, output, exit code."""

import json
import subprocess
import sys

import pytest
import typer

from client.cli import simulate


def tandem(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "client.cli", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_what_the_simulator_prints_comes_through() -> None:
    done = tandem("--requests", "5", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["requests"]["finished"] == 5
    assert "simulated" in done.stderr


def test_its_help_and_its_refusals_too() -> None:
    helped = tandem("--help")
    assert helped.returncode == 0 and "--find-rate" in helped.stdout
    refused = tandem("--machine", "abacus")
    assert refused.returncode == 2 and refused.stderr.startswith("error: no machine is called 'abacus'")


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(simulate, "PROGRAM", "scheduler_svc_of_nobody")
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    with pytest.raises(typer.Exit) as ended:
        simulate.simulate(context)
    assert ended.value.exit_code == 1
    assert "scheduler_svc_of_nobody cannot be found" in capsys.readouterr().err
