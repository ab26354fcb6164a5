"""Statuses become exceptions with their details, and the client retries some calls."""

import asyncio
import pickle
from typing import Any

import grpc
import pytest
from tandem.v1 import inference_pb2

from tandem_client import AsyncClient, Client, errors
from tandem_client.wire.request import FIELD_KEYWORDS, GenerateOptions
from tandem_client.wire.rpc_errors import name_of, with_names
from tests.client import fake_service as fake
from tests.client.both import Connect, either
from tests.client.descriptors import paths
from tests.client.fake_service import FakeService

CASES = [
    (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
    (grpc.StatusCode.NOT_FOUND, errors.NotFound),
    (grpc.StatusCode.ALREADY_EXISTS, errors.AlreadyExists),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFull),
    (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
    (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
    (grpc.StatusCode.CANCELLED, errors.Cancelled),
    (grpc.StatusCode.INTERNAL, errors.Internal),
    (grpc.StatusCode.UNIMPLEMENTED, errors.TandemError),
]


@pytest.mark.parametrize(("code", "kind"), CASES)
def test_each_status_has_its_class(
    service: FakeService, client: Client, code: grpc.StatusCode, kind: type[errors.TandemError]
) -> None:
    service.behaviour = fake.refusing(code, "what happened")
    with pytest.raises(errors.TandemError) as caught:
        list(client.generate("hi"))
    assert type(caught.value) is kind
    assert str(caught.value) == "what happened"
    assert caught.value.code == code
    assert caught.value.field is None
    assert caught.value.retry_after_seconds is None


def test_an_error_is_the_same_in_another_process_and_equals_no_other() -> None:
    violation = errors.FieldViolation(field="sampling.top_p", description="at most 1")
    error = errors.RateLimited(
        "slowly",
        code=grpc.StatusCode.RESOURCE_EXHAUSTED,
        violations=(violation,),
        retry_after_seconds=2.0,
        keyword="top_p",
        service_message="wait",
        stream_began=True,
        is_refusal=True,
        request_ended=True,
    )
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is errors.RateLimited and vars(other) == vars(error) and other.args == error.args == ("slowly",)
    assert len({error, other}) == 2 and repr(error) == "RateLimited('slowly')"


@pytest.mark.parametrize("given", [{}, {"code": None, "service_message": None}])
def test_an_error_without_a_status_is_an_unknown_one(given: Any) -> None:
    error = errors.TandemError("what happened", **given)
    assert (error.code, error.service_message) == (grpc.StatusCode.UNKNOWN, "what happened")


def test_a_stream_that_a_proxy_cut_is_a_lost_connection(service: FakeService, client: Client) -> None:
    """A proxy cannot send a status after the first frame of an answer: it resets the stream, which gRPC reads so."""
    said = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"
    service.behaviour = fake.sending(fake.ends(grpc.StatusCode.INTERNAL, said))
    with pytest.raises(errors.Unavailable, match="lost the connection to the service") as caught:
        list(client.generate("hi"))
    assert caught.value.stream_began and not caught.value.is_refusal and caught.value.code is grpc.StatusCode.INTERNAL


@either
def test_the_details_of_an_error_are_read(service: FakeService, connect: Connect) -> None:
    details = (fake.bad_request("sampling.top_p", "top_p is 3; at most 1"), fake.retry_info(1.5))
    service.behaviour = fake.refusing(grpc.StatusCode.INVALID_ARGUMENT, "top_p is 3", *details)
    with connect(service.address) as client, pytest.raises(errors.InvalidArgument) as caught:
        list(client.generate("hi"))
    assert (caught.value.field, caught.value.keyword) == ("sampling.top_p", "top_p")
    assert caught.value.violations[0].description == "top_p is 3; at most 1"
    assert caught.value.retry_after_seconds == 1.5


def test_pushback_metadata_sets_the_retry_time(service: FakeService, client: Client) -> None:
    full = fake.ends(grpc.StatusCode.RESOURCE_EXHAUSTED, "1024 requests wait", grpc_retry_pushback_ms="250")
    service.behaviour = fake.sending(full, accepts=False)
    with pytest.raises(errors.QueueFull) as caught:
        list(client.generate("hi"))
    assert caught.value.retry_after_seconds == 0.25


@either
def test_a_message_over_the_limit_is_not_a_full_queue(service: FakeService, connect: Connect) -> None:
    too_long = "x" * (4 * 2**20 + 1)
    with connect(service.address) as client, pytest.raises(errors.MessageTooLarge) as caught:
        list(client.generate(too_long))
    # The bytes of the text, of its field's tag and of its length.
    size = f"{len(too_long) + 5:,}"
    assert str(caught.value) == f"the request has {size} bytes; the service takes 4,194,304 (max_message_bytes)"
    assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not caught.value.stream_began


@either
def test_a_call_is_retried_while_the_service_is_not_ready(service: FakeService, connect: Connect) -> None:
    def ready_at_last(request: inference_pb2.GenerateRequest, ending: fake.Ending) -> fake.Messages:
        refused = fake.refusing(grpc.StatusCode.UNAVAILABLE, "no worker", fake.retry_info(0.02))
        return (fake.one_completion if len(service.requests) == 3 else refused)(request, ending)

    service.behaviour = ready_at_last
    with connect(service.address, max_retries=2) as client:
        assert len(list(client.generate("hi"))) == 2
    assert len(service.requests) == 3


NOT_READY, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
SOON = fake.retry_info(0.01)
AFTER_A_TOKEN = fake.sending(fake.delta(0, [5], "R"), fake.fails(NOT_READY, "no", SOON))


@pytest.mark.parametrize(
    ("retries", "timeout", "code", "behaviour", "calls"),
    [
        pytest.param(2, None, NOT_READY, fake.refusing(NOT_READY, "no", SOON), 3, id="retries are bounded"),
        pytest.param(0, None, NOT_READY, fake.refusing(NOT_READY, "no", SOON), 1, id="retries are switched off"),
        pytest.param(9, None, NOT_READY, fake.refusing(NOT_READY, "no"), 1, id="the service gives no retry time"),
        pytest.param(9, None, FULL, fake.refusing(FULL, "no", SOON), 1, id="the queue is full"),
        pytest.param(9, None, NOT_READY, fake.sending(fake.fails(NOT_READY, "no", SOON)), 1, id="it was accepted"),
        pytest.param(9, None, NOT_READY, AFTER_A_TOKEN, 1, id="tokens were delivered"),
        pytest.param(
            9, 5.0, NOT_READY, fake.refusing(NOT_READY, "no", fake.retry_info(60)), 1, id="the timeout comes first"
        ),
    ],
)
def test_retries_end_at_the_maximum_number_and_at_the_timeout(
    service: FakeService, retries: int, timeout: float | None, code: grpc.StatusCode, behaviour: Any, calls: int
) -> None:
    service.behaviour = behaviour
    with Client(service.address, max_retries=retries) as client, pytest.raises(errors.TandemError) as caught:
        list(client.generate("hi", timeout=timeout))
    assert (caught.value.code, len(service.requests)) == (code, calls)


def test_the_timeout_ends_a_stream_in_the_client_and_in_the_service(service: FakeService, client: Client) -> None:
    service.behaviour = fake.endless
    with pytest.raises(errors.DeadlineExceeded):
        list(client.generate("hi", timeout=1.0))
    assert service.endings[0].wait()


def test_wait_ready_waits_until_the_service_serves(service: FakeService, client: Client) -> None:
    service.serving(False)
    assert client.health() is False
    with pytest.raises(errors.DeadlineExceeded, match="answers, but does not serve"):
        client.wait_ready(0.5)

    async def wait() -> None:
        async with AsyncClient(service.address) as async_client:
            assert await async_client.health() is False
            with pytest.raises(errors.DeadlineExceeded, match="answers, but does not serve"):
                await async_client.wait_ready(0.5)
            waiting = asyncio.create_task(async_client.wait_ready(fake.WAIT_SECONDS))
            await asyncio.sleep(0)
            service.serving(True)
            await waiting

    asyncio.run(wait())
    client.wait_ready(fake.WAIT_SECONDS)
    assert client.health() is True


def test_malformed_details_are_ignored(service: FakeService, client: Client) -> None:
    garbled = fake.ends(grpc.StatusCode.INTERNAL, "broken", grpc_status_details_bin=b"\xff\xff")
    service.behaviour = fake.sending(garbled, accepts=False)
    with pytest.raises(errors.Internal, match="broken"):
        list(client.generate("hi"))


def test_an_error_names_keywords_and_keeps_the_message_of_the_service(service: FakeService, client: Client) -> None:
    said = "stop.min_new_tokens is 9; the limit is max_new_tokens, here 3"
    service.behaviour = fake.refusing_field("stop.min_new_tokens", said)
    with pytest.raises(errors.InvalidArgument) as caught:
        list(client.generate("hi"))
    assert str(caught.value) == "min_new_tokens is 9; the limit is max_new_tokens, here 3"
    assert (caught.value.keyword, caught.value.field) == ("min_new_tokens", "stop.min_new_tokens")
    assert caught.value.service_message == said


@pytest.mark.parametrize(
    ("field", "said", "keyword", "message"),
    [
        ("stop.stop_strings[0]", "stop.stop_strings[0] is empty", "stop[0]", "stop[0] is empty"),
        ("text", "text has 0 characters; a text is needed", "prompt", "prompt has 0 characters; a text is needed"),
        ("token_ids.ids[3]", "token_ids.ids[3] is 9", "prompt[3]", "prompt[3] is 9"),
        (
            "sampling.allowed_token_ids", "sampling.allowed_token_ids has 1, and sampling.banned_token_ids bans it",
            "allowed_token_ids", "allowed_token_ids has 1, and banned_token_ids bans it",
        ),
        ("sampling.logit_bias[7]", "sampling.logit_bias[7] is nan", "logit_bias[7]", "logit_bias[7] is nan"),
        ("chat.messages[2].role", "chat.messages[2].role is 'x'", "chat[2].role", "chat[2].role is 'x'"),
        ("chat.tools_json[0]", "chat.tools_json[0] is not JSON", "tools[0]", "tools[0] is not JSON"),
        ("chat.unparsed", "chat.unparsed is set", "parsed", "parsed is set"),
        ("chat", "chat is not served", "chat", "chat is not served"),
        ("constraint.json_schema", "constraint.json_schema is 3", "json_schema", "json_schema is 3"),
        ("constraint.choices.choices[1]", "constraint.choices.choices[1] is 3", "choices[1]", "choices[1] is 3"),
        # A field that is newer than this client keeps its path.
        ("sampling.newer", "sampling.newer is 3", "sampling.newer", "sampling.newer is 3"),
        ("prompt", "prompt is missing; give text or token_ids", "prompt", "prompt is missing; give text or token_ids"),
    ],
)  # fmt: skip
def test_field_paths_are_replaced_by_keywords(field: str, said: str, keyword: str, message: str) -> None:
    assert name_of(field, FIELD_KEYWORDS) == keyword
    assert with_names(said, FIELD_KEYWORDS, field=field) == message


def test_each_field_of_a_request_has_a_keyword_that_generate_takes() -> None:
    fields = set(paths(inference_pb2.GenerateRequest.DESCRIPTOR))
    assert fields <= set(FIELD_KEYWORDS)
    assert {FIELD_KEYWORDS[path] for path in fields} == set(GenerateOptions.__annotations__) | {"prompt"}
