"""Drains and updates of weights under one table: the clients' iterators of progress, and the commands."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tandem.v1 import control_pb2
from typer.testing import CliRunner

from tandem_client.cli.__main__ import app
from tandem_client.cli.commands import queries
from tandem_client.errors import NotFound
from tandem_client.types import DrainState, UpdateState
from tests.client.both import Connect, either
from tests.client.fake_service import WAIT_SECONDS, Ending, FakeService, fails, refusing, stays


@dataclass(frozen=True, kw_only=True)
class Kind:
    start: Callable[[Any], Any]
    request: Any
    response: type[Any]
    states: tuple[str, ...]
    """In the order of their numbers; the last one is that of a number that is not known yet."""
    own: dict[str, Any]
    command: tuple[str, ...]
    line: str

    def answers(self, *numbers: int) -> list[Any]:
        return [self.response(state=number, **self.values(number)) for number in numbers]

    def values(self, number: int) -> dict[str, Any]:
        return {"running": 3, "waiting": 1200, "seconds": number + 0.25, "detail": f"what {number}", **self.own}


KINDS = {
    "drain": Kind(
        start=lambda client: client.drain("w", max_seconds=2.5, force=True),
        request=control_pb2.DrainRequest(worker="w", max_seconds=2.5, force=True),
        response=control_pb2.DrainResponse,
        states=tuple(DrainState),
        own={"worker": "w", "worker_running": 1, "tokens_left": 2345, "moved": 4},
        command=("drain", "w", "--max", "2.5", "--force"),
        line="1 request here, 4 moved  about 2,345 tokens left",
    ),
    "drain of the service": Kind(
        start=lambda client: client.drain(),
        request=control_pb2.DrainRequest(),
        response=control_pb2.DrainResponse,
        states=tuple(DrainState),
        own={"worker": "", "worker_running": 0, "tokens_left": 1, "moved": 0},
        command=("drain",),
        line="3 running, 1,200 waiting  about 1 token left",
    ),
    "update": Kind(
        start=lambda client: client.update_weights("/f", version="v1", running="abort", in_turn=True, max_seconds=2.5),
        request=control_pb2.UpdateWeightsRequest(
            folder="/f", version="v1", running=control_pb2.RUNNING_REQUESTS_ABORT, in_turn=True, max_seconds=2.5
        ),
        response=control_pb2.UpdateWeightsResponse,
        states=tuple(UpdateState),
        own={"version": "v1", "workers": 2, "workers_updated": 1},
        command=("update-weights", "/f", "--version", "v1", "--running", "abort", "--in-turn", "--max", "2.5"),
        line="1 of 2 workers updated  3 running, 1,200 waiting",
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def read(service: FakeService, start: Callable[[Any], Any], connect: Connect, *, most: int = 99) -> list[Any]:
    """What one of the clients yields, at most `most` of it."""
    with connect(service.address) as client, closing(start(client)) as progress:
        return list(itertools.islice(progress, most))


@each_kind
@either
def test_the_iterator_yields_each_report_until_the_last(service: FakeService, kind: Kind, connect: Connect) -> None:
    numbers = range(1, len(kind.states) + 1)
    service.operation = lambda request, ending: iter(kind.answers(*numbers))
    found = read(service, kind.start, connect)
    assert service.requests == [kind.request]
    assert [each.state for each in found] == list(kind.states)
    for number, each in zip(numbers, found, strict=True):
        assert {name: getattr(each, name) for name in kind.values(number)} == kind.values(number)


def once(kind: Kind, then: Callable[[Ending], object] = stays) -> Any:
    """The code of an operation: its first report, and then this."""

    def operation(request: Any, ending: Ending) -> Iterator[Any]:
        yield from kind.answers(1)
        then(ending)

    return operation


@each_kind
@either
def test_a_loop_that_is_left_ends_the_call(service: FakeService, kind: Kind, connect: Connect) -> None:
    service.operation = once(kind)
    [each] = read(service, kind.start, connect, most=1)
    assert each.state == kind.states[0]
    assert service.endings[0].wait()


@each_kind
@either
def test_a_refusal_is_raised_after_what_came_before(service: FakeService, kind: Kind, connect: Connect) -> None:
    service.operation = once(kind, fails(grpc.StatusCode.NOT_FOUND, "worker: there is none"))
    with pytest.raises(NotFound, match="worker: there is none"):
        read(service, kind.start, connect)


@either
def test_a_wrong_word_is_an_error_of_the_call_in_both_clients(service: FakeService, connect: Connect) -> None:
    said = "running is 'later'; it must be finish, recompute, continue or abort"
    with connect(service.address) as made, pytest.raises(ValueError, match=said):
        made.update_weights("/f", version="v1", running="later")
    assert service.requests == []


def tandem(service: FakeService, *arguments: str) -> Any:
    return CliRunner(env={"TANDEM_ADDRESS": service.address}).invoke(app, arguments)


@each_kind
def test_the_command_prints_a_line_for_each_report_and_its_exit_code_is_that_of_the_last(
    service: FakeService, kind: Kind
) -> None:
    for number, state in enumerate(kind.states[:-1], 1):
        service.operation = lambda request, ending, number=number: iter(kind.answers(1, number))
        shown = tandem(service, *kind.command)
        first, last = shown.stdout.splitlines()
        assert first == f"   1.25 s  {kind.states[0]:11}  {kind.line}  what 1"
        words = state.replace("_", " ")
        assert last == f"{number + 0.25:7.2f} s  {words:11}  {kind.line}  what {number}"
        assert (shown.exit_code, shown.stderr) == (0 if state == "done" else 1, "")
        shown = tandem(service, *kind.command, "--json")
        values = [json.loads(line) for line in shown.stdout.splitlines()]
        assert values == [{"state": each, **kind.values(n)} for each, n in ((kind.states[0], 1), (state, number))]
        assert shown.exit_code == (0 if state == "done" else 1)
    assert service.requests == [kind.request] * 2 * (len(kind.states) - 1)


@each_kind
def test_a_command_that_is_interrupted_says_that_the_operation_goes_on(
    service: FakeService, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = threading.Event()

    def show(value: object, text: str, as_json: bool) -> None:
        show_as_before(value, text, as_json)
        printed.set()

    show_as_before = queries._print
    monkeypatch.setattr(queries, "_print", show)

    def interrupt(ending: Ending) -> None:
        assert printed.wait(WAIT_SECONDS)
        os.kill(os.getpid(), signal.SIGINT)
        stays(ending)

    service.operation = once(kind, interrupt)
    shown = tandem(service, *kind.command)
    assert shown.exit_code == 130
    assert shown.stderr == "it goes on; the same command shows its progress again\n"
    assert len(shown.stdout.splitlines()) == 1
    assert service.endings[0].wait()


@pytest.mark.parametrize("kind", [KINDS["drain"], KINDS["update"]], ids=["drain", "update"])
def test_a_command_whose_time_is_over_says_that_the_operation_goes_on(service: FakeService, kind: Kind) -> None:
    service.operation = once(kind)
    shown = tandem(service, *kind.command, "--timeout", "1.5")
    assert shown.exit_code == 4
    assert shown.stderr.startswith("it goes on; the same command shows its progress again\nerror: ")


@each_kind
def test_a_command_that_is_refused_says_nothing_of_going_on(service: FakeService, kind: Kind) -> None:
    service.operation = refusing(grpc.StatusCode.NOT_FOUND, "worker: there is none")
    shown = tandem(service, *kind.command)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr == "error: worker: there is none (tandem load shows the workers)\n"
