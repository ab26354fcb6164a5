"""A fake service for each test, and clients of it."""

from collections.abc import Iterator

import pytest

from client import Client
from tests.client.fake_service import FakeService


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    yield fake
    fake.stop()


@pytest.fixture
def client(service: FakeService) -> Iterator[Client]:
    with Client(service.address) as made:
        yield made
