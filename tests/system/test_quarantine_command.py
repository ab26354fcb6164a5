"""`tandem quarantine` with the real service: what it lists, and what `--clear` does."""

import grpc
from typer.testing import CliRunner

from tandem_client.cli.__main__ import app
from tests.rigs.processes import Rig
from tests.rigs.streams import Caller, code_of
from tests.system.asks import Ask

CULPRIT = 281


def sent(caller: Caller, number: int, request_id: str) -> grpc.StatusCode:
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
        assert sent(caller, number, name) == grpc.StatusCode.INTERNAL
    lines = tandem()
    assert [line.split()[1].rstrip(",") for line in lines[::2]] == list(numbers)
    assert all("its step failed 2 times while it ran alone at token 3" in line for line in lines[1::2])
    key = lines[2].split()[0]
    assert sent(caller, numbers["second"], "again") == grpc.StatusCode.FAILED_PRECONDITION

    assert tandem("--clear", key) == ["1 request may run again"]
    assert [line.split()[1].rstrip(",") for line in tandem()[::2]] == ["first", "third"]
    # It runs again, and is convicted again.
    assert sent(caller, numbers["second"], "again") == grpc.StatusCode.INTERNAL
    assert sent(caller, numbers["first"], "again") == grpc.StatusCode.FAILED_PRECONDITION
    assert tandem("--clear") == ["3 requests may run again"]
    assert tandem() == ["no request is quarantined"]
    assert sent(caller, numbers["first"], "again") == grpc.StatusCode.INTERNAL
