"""What a call tells a proxy in front of several services: the affinity of its request."""

from collections.abc import Iterator

from tandem.v1 import inference_pb2

from tandem_client import Client
from tandem_client.wire.request import generate_request
from tandem_client.wire.routing import affinity_of
from tests.client import fake_service
from tests.client.fake_service import Ending, FakeService


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
    seen: list[str] = []

    def watched(request: inference_pb2.GenerateRequest, ending: Ending) -> Iterator[inference_pb2.GenerateResponse]:
        seen.append(dict(ending.context.invocation_metadata())["tandem-affinity"])
        return fake_service.one_completion(request, ending)

    service.behaviour = watched
    with Client(service.address) as client:
        for prompt in ("a", "a", "b"):
            list(client.generate(prompt))
    assert seen[0] == seen[1] != seen[2]
