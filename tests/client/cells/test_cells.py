"""Clients of several cells against fake services: where calls go, and what happens when a cell fails."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import AsyncClient, Client
from tandem_client.cells.router import Router
from tandem_client.errors import InvalidArgument, NotFound, NothingAnswers, QueueFull, RateLimited, Unavailable
from tandem_client.types import AbortOutcome
from tandem_client.wire.routing import affinity_of
from tests.client import fake_service
from tests.client.fake_service import Behaviour, Ending, FakeService, fail, retry_info


@pytest.fixture
def cells() -> Iterator[list[FakeService]]:
    made = [FakeService() for _ in range(3)]
    for each in made:
        each.load = control_pb2.GetLoadResponse(workers=1)
    yield made
    for each in made:
        each.stop()


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest, cells: list[FakeService]) -> Callable[..., object]:
    """Runs steps with a client: a blocking one, or an asynchronous one behind the same calls."""

    def of(steps: Callable[["Calls"], object], **settings: int) -> object:
        addresses = [cell.address for cell in cells]
        if request.param == "sync":
            with Client(addresses, **settings) as client:
                return steps(Calls(client, lambda value: value))
        with asyncio.Runner() as runner:
            client = AsyncClient(addresses, **settings)

            async def do(value: Awaitable[object]) -> object:
                return await value

            try:
                return steps(Calls(client, lambda value: runner.run(do(value)), runner))
            finally:
                runner.run(client.close())

    return of


class Calls:
    """The calls of both kinds of client, blocking."""

    def __init__(
        self, client: Client | AsyncClient, wait: Callable[..., object], runner: asyncio.Runner | None = None
    ) -> None:
        self.client, self._wait, self._runner = client, wait, runner

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *given, **options: self._wait(getattr(self.client, name)(*given, **options))

    def text(self, prompt: str, **options: object) -> str:
        """A whole completion."""
        return self.read(lambda: self.client.generate(prompt, **options))

    def read(self, start: Callable[[], object]) -> str:
        if self._runner is None:
            return "".join(delta.text for delta in start())

        async def all_of_it() -> str:
            return "".join([delta.text async for delta in start()])

        return self._runner.run(all_of_it())


def num_requests(cells: list[FakeService]) -> list[int]:
    return [len(cell.requests) for cell in cells]


def home(cells: list[FakeService], prompt: str) -> list[FakeService]:
    """The cells by preference for a prompt."""
    key = affinity_of(inference_pb2.GenerateRequest(text=prompt))
    return [cells[number] for number in Router([cell.address for cell in cells]).order(key)]


def refusing(code: grpc.StatusCode, message: str, *details: object) -> Behaviour:
    def behaviour(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        fail(ending.context, code, message, *details)
        yield from ()

    return behaviour


def test_equal_beginnings_go_to_one_cell_and_others_to_all(
    run: Callable[..., object], cells: list[FakeService]
) -> None:
    def steps(calls: Calls) -> None:
        for last in range(6):
            assert calls.text("x" * 1024 + str(last)) == "Réturn"
        assert sorted(num_requests(cells)) == [0, 0, 6]
        # The hash depends on the ports, so the numbers do: 30 each, with a deviation of 4.5.
        for number in range(90):
            calls.text(f"prompt {number}")
        assert min(num_requests(cells)) >= 5

    run(steps)


def test_a_cell_that_is_gone_is_replaced_by_the_next(run: Callable[..., object], cells: list[FakeService]) -> None:
    first, second, _ = home(cells, "hi")

    def steps(calls: Calls) -> None:
        first.stop()
        assert [calls.text("hi") for _ in range(3)] == ["Réturn"] * 3
        assert len(second.requests) == 3

    run(steps)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.UNAVAILABLE, "no worker has joined"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full"),
    ],
)
def test_a_refusal_of_a_service_sends_the_request_on(
    run: Callable[..., object], cells: list[FakeService], code: grpc.StatusCode, message: str
) -> None:
    first, second, _ = home(cells, "hi")
    first.behaviour = refusing(code, message, retry_info(1.0))

    def steps(calls: Calls) -> None:
        assert calls.text("hi") == "Réturn"
        assert (len(first.requests), len(second.requests)) == (1, 1)

    run(steps)


def test_if_all_cells_refuse_the_error_is_the_one_that_says_when_to_retry(
    run: Callable[..., object], cells: list[FakeService]
) -> None:
    first, second, third = home(cells, "hi")
    first.stop()
    second.behaviour = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_info(2.0))
    third.stop()

    def steps(calls: Calls) -> None:
        with pytest.raises(QueueFull, match="the queue is full") as caught:
            calls.text("hi")
        assert caught.value.retry_after_seconds == 2.0
        assert len(second.requests) == 1

    run(steps, max_retries=0)


def test_what_another_cell_would_refuse_too_is_not_sent_there(
    run: Callable[..., object], cells: list[FakeService]
) -> None:
    first, *others = home(cells, "hi")
    wrong = fake_service.bad_request("stop.max_new_tokens", "is 0; it must be at least 1")
    quota = error_details_pb2.QuotaFailure()

    def steps(calls: Calls) -> None:
        first.behaviour = refusing(grpc.StatusCode.INVALID_ARGUMENT, "stop.max_new_tokens is 0", wrong)
        with pytest.raises(InvalidArgument):
            calls.text("hi", max_new_tokens=0)
        first.behaviour = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "60 per minute", retry_info(9.0), quota)
        with pytest.raises(RateLimited):
            calls.text("hi")
        # A connection that broke does not say whether the request was accepted.
        first.behaviour = lambda request, ending: ending.context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        with pytest.raises(Unavailable, match="Socket closed"):
            calls.text("hi")
        assert num_requests(others) == [0, 0]

    run(steps)


def test_a_stream_that_began_is_not_sent_to_another_cell(run: Callable[..., object], cells: list[FakeService]) -> None:
    first, *others = home(cells, "hi")

    def broken(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        yield fake_service.accepted(request)
        fail(ending.context, grpc.StatusCode.UNAVAILABLE, "the service stops", retry_info(1.0))

    first.behaviour = broken

    def steps(calls: Calls) -> None:
        with pytest.raises(Unavailable, match="the service stops"):
            calls.text("hi")
        assert num_requests(others) == [0, 0]

    run(steps)


def test_resume_and_abort_go_to_the_cell_of_the_request(run: Callable[..., object], cells: list[FakeService]) -> None:
    first, *others = home(cells, "hi")

    def steps(calls: Calls) -> None:
        calls.text("hi", request_id="live-1")
        with pytest.raises(NotFound):
            calls.read(lambda: calls.client.resume("live-1", b"secret"))
        assert [len(cell.resumed) for cell in (first, *others)] == [1, 0, 0]
        assert calls.abort("live-1") == {"live-1": AbortOutcome.ABORTED}
        assert (first.aborted, [cell.aborted for cell in others]) == (["live-1"], [[], []])

    run(steps)


def test_resume_and_abort_of_unknown_ids_ask_all_cells(run: Callable[..., object], cells: list[FakeService]) -> None:
    def kept(request: inference_pb2.ResumeRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        whole = inference_pb2.GenerateRequest(request_id=request.request_id)
        return fake_service.one_completion(whole, ending)

    cells[2].resumption = kept

    def steps(calls: Calls) -> None:
        assert calls.read(lambda: calls.client.resume("theirs", b"secret")) == "Réturn"
        assert [len(cell.resumed) for cell in cells] == [1, 1, 1]
        # From now on its cell is known.
        assert calls.read(lambda: calls.client.resume("theirs", b"secret")) == "Réturn"
        assert [len(cell.resumed) for cell in cells] == [1, 1, 2]
        assert calls.abort("nobody's") == {"nobody's": AbortOutcome.NOT_FOUND}
        assert [cell.aborted for cell in cells] == [["nobody's"]] * 3

    run(steps)


def test_an_abort_fails_if_the_cell_that_may_have_the_request_is_away(
    run: Callable[..., object], cells: list[FakeService]
) -> None:
    cells[0].stop()

    def steps(calls: Calls) -> None:
        # Another cell has aborted it, so the one that is away cannot have it.
        assert calls.abort("live-1") == {"live-1": AbortOutcome.ABORTED}
        with pytest.raises(NothingAnswers):
            calls.abort("live-1", "x")

    run(steps, max_retries=0)


def test_other_calls_are_answered_by_a_cell_that_is_there(run: Callable[..., object], cells: list[FakeService]) -> None:
    cells[0].stop()
    cells[1].stop()

    def steps(calls: Calls) -> None:
        calls.wait_ready(10.0)
        assert calls.health() is True
        assert calls.tokenize("hi") and calls.model_info().model
        cells[2].stop()
        for call in (calls.health, calls.model_info):
            with pytest.raises(NothingAnswers):
                call()

    run(steps, max_retries=0)


@pytest.mark.parametrize("name", ["load", "flush_cache", "quarantine", "clear_quarantine"])
def test_calls_about_one_service_are_refused(run: Callable[..., object], cells: list[FakeService], name: str) -> None:
    def steps(calls: Calls) -> None:
        with pytest.raises(ValueError, match=f"is a call to one service, and this client has 3.*{cells[0].address}"):
            getattr(calls, name)()

    run(steps)


def test_streams_that_are_left_early_count_no_longer(cells: list[FakeService]) -> None:
    first, *others = home(cells, "hi")
    for cell in cells:
        cell.behaviour = fake_service.endless
    with Client([cell.address for cell in cells]) as client:
        for _ in range(20):
            with client.generate("hi") as stream:
                next(stream)
        assert (len(first.requests), num_requests(others)) == (20, [0, 0])
        streams = [client.generate("hi") for _ in range(20)]
        for stream in streams:
            next(stream)
        assert all(num_requests(others)), "twenty at once are more than the share of one cell"
        for stream in streams:
            stream.close()
