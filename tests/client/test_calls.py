"""The short calls of both clients."""

import asyncio
import functools
import inspect

import pytest
from tandem.v1 import control_pb2, inference_pb2

from tandem_client import AsyncClient, Client
from tandem_client.types import AbortOutcome, DrainState, FinishReason, RequestState, WaitReason
from tandem_client.wire import messages
from tests.client import fake_service
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService


@either
def test_a_client_makes_every_unary_call(service: FakeService, connect: Connect) -> None:
    with connect(service.address) as client:
        assert client.tokenize("hé", model="fake") == list("hé".encode())
        assert client.detokenize([104, 105], skip_special_tokens=False) == "hi"
        assert client.abort("live-1", "gone") == {"live-1": AbortOutcome.ABORTED, "gone": AbortOutcome.NOT_FOUND}
        info = client.model_info()
        assert (info.model, info.eos_token_ids, info.sampling_defaults.temperature) == ("fake", (0,), 0.5)
        assert (info.sampling_defaults.repetition_penalty, info.max_num_samples, info.max_logprobs) == (1.25, 16, 20)
        assert (info.window, info.sink_tokens) == (4096, 4)
        assert (info.limits.max_stop_strings, info.limits.min_priority, info.limits.max_new_tokens) == (16, -3, None)
        load = client.load()
        assert (load.running, load.steps, load.worker_pid) == (2, 2**40, 77)
        assert (load.cached_prompt_tokens, load.hit_rate) == (200, 0.25)
        assert [(worker.pid, worker.pages_total) for worker in load.per_worker] == [(77, 99), (78, 99)]
        assert client.flush_cache() == 12 and client.health()
        with pytest.raises(ValueError, match=r"token_ids is \[-1\]"):
            client.detokenize([-1])


@either
@pytest.mark.parametrize("timeout", [1e9, 1e10, 2.0**70, float("inf")])
def test_a_timeout_of_decades_is_no_limit(service: FakeService, connect: Connect, timeout: float) -> None:
    with connect(service.address) as client:
        assert client.health(timeout=timeout)
        client.wait_ready(timeout)
        assert list(client.generate("hi", timeout=timeout))
        assert list(client.drain(timeout=timeout)) == []


@either
def test_a_timeout_that_is_no_number_is_refused_by_its_name(service: FakeService, connect: Connect) -> None:
    with connect(service.address) as client:
        for call in (client.health, client.drain, functools.partial(client.generate, "hi")):
            with pytest.raises(ValueError, match="timeout is nan"):
                list(call(timeout=float("nan")))


def test_an_async_client_made_before_the_loop_serves_several_loops(service: FakeService) -> None:
    client = AsyncClient(service.address)

    async def calls() -> None:
        async with client:
            assert await client.tokenize("hi") == [104, 105]
            assert await client.health()

    for _ in range(2):
        asyncio.run(calls())


ENTRIES = [
    control_pb2.RequestEntry(
        request_id=f"r{number}", tenant="acme", abort_id=f"acme/r{number}", state=control_pb2.REQUEST_STATE_RUNNING,
        age_seconds=1.5, output_tokens=number, num_samples=1, worker="w", seconds_left=2.0 if number else None,
    )
    for number in range(5)
]  # fmt: skip


@either
def test_the_list_of_requests_comes_in_pages_or_all_together(service: FakeService, connect: Connect) -> None:
    service.listed = ENTRIES
    with connect(service.address) as client:
        page = client.list_requests(page_size=3, states=["running", RequestState.KEPT], tenant="acme", id_prefix="r")
        wanted = control_pb2.ListRequestsRequest(page_size=3, states=[2, 3], tenant="acme", id_prefix="r")
        assert (service.list_queries, page.next_page_token) == ([wanted], "3")
        first = page.requests[0]
        assert (first.abort_id, first.state, first.wait_reason) == ("acme/r0", RequestState.RUNNING, None)
        assert [each.seconds_left for each in page.requests] == [None, 2.0, 2.0]
        assert [each.request_id for each in client.list_requests(page_token="3").requests] == ["r3", "r4"]
        assert [each.request_id for each in client.all_requests(tenant="acme")] == ["r0", "r1", "r2", "r3", "r4"]
        tokens = [query.page_token for query in service.list_queries[2:]]
        assert (tokens, {query.tenant for query in service.list_queries[2:]}) == (["", "2", "4"], {"acme"})
        with pytest.raises(ValueError, match="a state is 'old'; it must be waiting, running or kept"):
            client.list_requests(states=["old"])
        assert len(client.list_requests().requests) == 2


def test_a_blocking_client_works_where_an_event_loop_runs(client: Client, service: FakeService) -> None:
    """As in a notebook: what waits is written for a loop, and the blocking client must not meet the one that runs."""
    service.listed = ENTRIES
    service.operation = lambda request, ending: iter([control_pb2.DrainResponse(state=1), control_pb2.DrainResponse()])

    async def calls() -> None:
        client.wait_ready(fake_service.WAIT_SECONDS)
        assert [request.request_id for request in client.all_requests()] == ["r0", "r1", "r2", "r3", "r4"]
        assert [report.state for report in client.drain()] == [DrainState.DRAINING, DrainState.UNKNOWN]
        # Left early, with nothing for the loop to end.
        assert next(iter(client.drain())).state == DrainState.DRAINING
        assert next(iter(client.all_requests())).request_id == "r0"
        assert [delta.text for delta in client.generate("hi")] == ["Ré", "turn"]

    asyncio.run(calls(), debug=True)


def test_a_list_has_why_a_request_waits(client: Client, service: FakeService) -> None:
    service.listed = [
        control_pb2.RequestEntry(state=1, wait_reason=inference_pb2.WAIT_REASON_TENANT_SHARE, wait_message="its share"),
        control_pb2.RequestEntry(state=99, wait_reason=999),  # type: ignore[arg-type]
    ]
    waits, later = client.list_requests().requests
    assert (waits.wait_reason, waits.wait_message) == (WaitReason.TENANT_SHARE, "its share")
    assert (later.state, later.wait_reason) == (RequestState.UNKNOWN, WaitReason.UNKNOWN)


def test_an_abort_has_what_was_looked_for() -> None:
    results = [
        control_pb2.AbortResult(request_id="a", outcome=control_pb2.ABORT_OUTCOME_ABORTED),
        control_pb2.AbortResult(request_id="b", outcome=control_pb2.ABORT_OUTCOME_NOT_FOUND, detail="none is 'b'"),
    ]
    assert messages.abort_outcomes(control_pb2.AbortResponse(results=results)).details == {"b": "none is 'b'"}


def test_load_contains_the_reasons_for_not_serving_and_for_a_lost_worker() -> None:
    worker = control_pb2.WorkerLoad(pid=7, device="cuda:0 NVIDIA H200")
    message = control_pb2.GetLoadResponse(
        not_serving="no worker has joined", worker_lost_seconds=0.0, worker_lost_reason="killed", per_worker=[worker]
    )
    load, none = messages.load(message), messages.load(control_pb2.GetLoadResponse())
    assert (load.not_serving, load.worker_lost_seconds) == ("no worker has joined", 0.0)
    assert (load.worker_lost_reason, load.per_worker[0].device) == ("killed", "cuda:0 NVIDIA H200")
    # And the hit rate before the first prompt.
    assert (none.worker_lost_seconds, none.hit_rate) == (None, 0)


def test_every_finish_reason_of_the_api_has_a_name() -> None:
    """Only a reason that is newer than this client becomes unknown."""
    for name, number in inference_pb2.FinishReason.items():
        reason = messages.finished(inference_pb2.Finished(reason=number)).reason
        assert reason == name.removeprefix("FINISH_REASON_").lower() or number == 0
    assert messages.finished(inference_pb2.Finished()).reason == FinishReason.UNKNOWN


def test_requests_carry_the_given_options(service: FakeService, client: Client) -> None:
    client.detokenize([1], skip_special_tokens=False, model="m")
    client.detokenize([1])
    first, second = service.requests
    assert (first.model, first.skip_special_tokens) == ("m", False)
    assert not second.HasField("skip_special_tokens")


def test_both_clients_have_the_same_calls_with_the_same_signatures():
    public = [name for name in dir(Client) if not name.startswith("_")]
    assert public == [name for name in dir(AsyncClient) if not name.startswith("_")]
    for name in public:
        blocking, asynchronous = (inspect.signature(getattr(kind, name)).parameters for kind in (Client, AsyncClient))
        assert list(blocking.values()) == list(asynchronous.values())
        assert getattr(Client, name).__doc__ and next(iter(blocking)) == "self"
    with Client("127.0.0.1:1") as client:
        assert list(inspect.signature(client.tokenize).parameters) == ["text", "add_special_tokens", "model", "timeout"]
