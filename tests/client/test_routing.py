"""What a call shows to a proxy in front of several services, and what the answer shows: affinity and service."""

from functools import partial

import pytest
from tandem.v1 import inference_pb2

from tandem_client import Client
from tandem_client.wire.request import affinity_of, generate_request
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService
from tests.client.proxied import NAME, Proxied


def of_text(text: str, salt: str = "") -> str:
    request = inference_pb2.GenerateRequest(text=text)
    request.cache.salt = salt
    return affinity_of(request)


def test_the_affinity_is_that_of_salt_and_beginning() -> None:
    assert of_text("x" * 1024 + "a") == of_text("x" * 1024 + "b")
    assert len({of_text("x"), of_text("y"), of_text("x", "s"), of_text("", "x")}) == 4
    ids = [inference_pb2.TokenIds(ids=[*range(256), last]) for last in (7, 8)]
    first, second = (affinity_of(inference_pb2.GenerateRequest(token_ids=each)) for each in ids)
    assert first == second and len(first) == 16 and int(first, 16) >= 0
    assert affinity_of(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(255)))) != first


def test_all_turns_of_a_conversation_have_one_affinity() -> None:
    first = [("system", "Be brief."), ("user", "Hello")]
    turns = [first, [*first, ("assistant", "Hi"), ("user", "And?")], [*first, ("assistant", "x" * 5000)]]

    def affinity(turn: list[tuple[str, str]], **options: object) -> str:
        messages = [{"role": role, "content": text} for role, text in turn]
        return affinity_of(generate_request(None, chat=messages, **options))

    assert len({affinity(turn) for turn in turns}) == 1
    others = [
        affinity(first[1:]),
        affinity([("system", "Be long."), first[1]]),
        affinity(first, tools=[{"type": "x"}]),
        affinity(first, cache_salt="s"),
    ]
    assert len({affinity(first), *others}) == 1 + len(others)


def test_every_client_sends_the_affinity(service: FakeService) -> None:
    with Client(service.address) as client:
        for prompt in ("a", "a", "b"):
            list(client.generate(prompt))
    seen = [dict(ending.context.invocation_metadata())["tandem-affinity"] for ending in service.endings]
    assert seen[0] == seen[1] != seen[2]


@either
def test_a_stream_tells_its_service_and_calls_elsewhere_go_there(proxied: Proxied, connect: Connect) -> None:
    """Another client resumes and aborts it, at its service and anywhere."""
    with connect(proxied.address) as client, connect(proxied.address) as other:
        stream = client.generate("hi")
        said = [stream.service, next(stream).text, stream.service]
        for service in (stream.service, None):
            resumed = other.resume("live", b"secret", service=service)
            said += [resumed.service, "".join(delta.text for delta in resumed), resumed.service]
            other.abort("live", service=service)
    assert said == [None, "Ré", NAME, NAME, "Réturn", NAME, None, "Réturn", NAME]
    assert proxied.asked == {"Generate": [None], "Resume": [NAME, None], "Abort": [NAME, None]}


def test_leaving_a_stream_that_lingers_aborts_it_at_its_service(proxied: Proxied) -> None:
    with Client(proxied.address) as client:
        stream = client.generate("hi", resume=True)
        next(stream)
        stream.close()
        # An answer without a name leaves the one that is known.
        proxied.name = None
        resumed = client.resume("live", b"secret", service=NAME)
        next(resumed)
        resumed.close()
    assert (proxied.asked["Resume"], proxied.asked["Abort"]) == ([NAME], [NAME, NAME])


def test_without_a_proxy_a_stream_has_no_service_to_tell(service: FakeService, client: Client) -> None:
    stream = client.generate("hi")
    assert list(stream) and stream.service is None


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "ä"])
def test_what_is_no_name_of_a_service_is_refused(client: Client, name: str) -> None:
    for call in (client.abort, partial(client.resume, secret=b"secret")):
        with pytest.raises(ValueError, match=r"service is .*; it must be a stream's `service`"):
            call("x", service=name)
