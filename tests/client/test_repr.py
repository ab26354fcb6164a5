"""The `repr` of clients, streams and samples, as a notebook or a debugger shows it."""

from tandem_client import AsyncClient, Client
from tests.client import fake_service
from tests.client.both import of_loop
from tests.client.fake_service import FakeService


def test_the_repr_of_a_client_contains_its_address() -> None:
    with Client("there:1") as client:
        assert repr(client) == "<Client there:1>"
    assert repr(AsyncClient("there:1")) == "<AsyncClient there:1>"


def test_the_repr_of_a_stream_contains_its_request_state_and_tokens(service: FakeService, client: Client) -> None:
    with client.generate("hi", request_id="req-7") as stream:
        assert repr(stream) == "<GenerateStream not accepted yet, 0 tokens>"
        next(stream)
        assert repr(stream) == "<GenerateStream req-7 running, 1 token>"
        assert repr(stream.samples) == "(<Sample 0 running, 1 token>,)"
        for _ in stream:
            pass
        assert repr(stream) == "<GenerateStream req-7 ended, 3 tokens>"
        assert repr(stream.samples) == "(<Sample 0 ended by length, 3 tokens>,)"
    service.behaviour = fake_service.endless
    with client.generate("hi", request_id="req-8", want_token_ids=False) as stream:
        next(stream)
    assert repr(stream) == "<GenerateStream req-8 closed>"


def test_the_repr_of_an_async_stream_contains_its_request_state_and_tokens(service: FakeService) -> None:
    with of_loop(service.address) as client:
        stream = client.generate("hi", request_id="req-9")
        assert [repr(stream), *(repr(stream) for _ in stream), repr(stream)] == [
            "<AsyncGenerateStream not accepted yet, 0 tokens>",
            "<AsyncGenerateStream req-9 running, 1 token>",
            "<AsyncGenerateStream req-9 running, 3 tokens>",
            "<AsyncGenerateStream req-9 ended, 3 tokens>",
        ]
