"""Options of this run, and the measured resources of each card, which the tests share."""

import pytest

from tests.kernels.cards import CARDS, Card
from tests.kernels.processes import measured
from tests.kernels.table import Line


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the tables of expected/ instead of comparing")
    parser.addoption("--cards", default=",".join(CARDS), help="the cards to compile for, separated by commas")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "card" in metafunc.fixturenames:
        cards = [CARDS[key] for key in metafunc.config.getoption("--cards").split(",")]
        metafunc.parametrize("card", cards, ids=lambda card: card.key, scope="session")


@pytest.fixture(scope="session")
def resources(card: Card) -> list[Line]:
    """The lines of one card."""
    return measured(card)
