"""A target that names several services: gRPC's round_robin takes turns over those that answer."""

from collections.abc import Iterator

import pytest

from tandem_client import Client
from tandem_client.errors import NothingAnswers
from tests.client.both import Connect, either
from tests.client.fake_service import FakeService


@pytest.fixture
def services() -> Iterator[list[FakeService]]:
    made = [FakeService() for _ in range(3)]
    yield made
    for each in made:
        each.stop()


def send(connect: Connect, target: str, count: int) -> None:
    with connect(target, max_retries=0) as client:
        for _ in range(count):
            assert "".join(delta.text for delta in client.generate("hi")) == "Réturn"


def target_of(services: list[FakeService]) -> str:
    return f"ipv4:{','.join(each.address for each in services)}"


def num_requests(services: list[FakeService]) -> list[int]:
    return [len(each.requests) for each in services]


@either
def test_requests_take_turns_over_the_services_that_answer(connect: Connect, services: list[FakeService]) -> None:
    send(connect, target_of(services), 30)
    # The first requests go to the service that is connected first.
    assert min(num_requests(services)) >= 5
    services[0].stop()
    first, *others = num_requests(services)
    send(connect, target_of(services), 10)
    assert num_requests(services)[0] == first and sum(num_requests(services)[1:]) == sum(others) + 10


@either
def test_if_none_answers_the_error_names_the_target(connect: Connect, services: list[FakeService]) -> None:
    for each in services:
        each.stop()
    with pytest.raises(NothingAnswers, match=f"nothing answers at {target_of(services)}: Connection refused"):
        send(connect, target_of(services), 1)


def test_another_address_is_one_service_with_one_connection(services: list[FakeService]) -> None:
    with Client(services[0].address) as client:
        for _ in range(4):
            list(client.generate("hi"))
    peers = {ending.context.peer() for ending in services[0].endings}
    assert len(peers) == 1


def test_a_name_is_looked_up(services: list[FakeService]) -> None:
    send(Client, f"dns:///localhost:{services[0].address.rpartition(':')[2]}", 2)
    assert num_requests(services) == [2, 0, 0]
