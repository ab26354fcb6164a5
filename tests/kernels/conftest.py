"""Options of this run, and the measured resources, which all tests of a run share."""

import pytest

from tests.kernels.cards import CARDS
from tests.kernels.processes import measured
from tests.kernels.table import Line


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write the tables of expected/ instead of comparing")
    parser.addoption("--cards", default=",".join(CARDS), help="the cards to compile for, separated by commas")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "card_key" in metafunc.fixturenames:
        metafunc.parametrize("card_key", metafunc.config.getoption("--cards").split(","))


@pytest.fixture(scope="session")
def resources(request: pytest.FixtureRequest) -> dict[str, list[Line]]:
    """The lines of every chosen card."""
    return measured(request.config.getoption("--cards").split(","))
