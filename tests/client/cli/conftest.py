"""The `tandem` command in this process, of the test's fake service."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from tandem_client.cli.__main__ import app
from tests.client.fake_service import FakeService


@pytest.fixture
def tandem(service: FakeService) -> Callable[..., Result]:
    """Runs the command with these arguments and standard input; its terminal has 80 columns."""
    runner = CliRunner(env={"TANDEM_ADDRESS": service.address, "COLUMNS": "80"})

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return runner.invoke(app, arguments, input=stdin)

    return run
