"""Machines with pools in host memory and on a card, whose runners capture their steps or not."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from tests.gpu_worker.shared_pool.machines import SPEC, Card, Host

# Heads of 5 MiB: the first pages are in some of their granules.
ON_CARD = replace(SPEC, num_pages=1300)


def machine_of(kind: str, device: torch.device, *, graphs: bool) -> Host:
    if kind == "host":
        return Host(spec=replace(SPEC, graphs=graphs))
    return Card(device=device, spec=replace(ON_CARD, graphs=graphs))


@pytest.fixture(params=["host", "host captured", "card", "card captured"])
def machine(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Host]:
    kind, _, captured = request.param.partition(" ")
    with closing(machine_of(kind, device, graphs=bool(captured))) as machine:
        yield machine


@pytest.fixture(params=["host", "card"])
def eager(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Host]:
    with closing(machine_of(request.param, device, graphs=False)) as machine:
        yield machine


@pytest.fixture
def card(device: torch.device) -> Iterator[Card]:
    with closing(Card(device=device, spec=ON_CARD)) as card:
        yield card
