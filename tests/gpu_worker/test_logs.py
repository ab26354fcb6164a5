"""What each rank of a host logs."""

import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from gpu_worker import __main__ as program
from gpu_worker.checkpoint import files, loading, tokenizer
from gpu_worker.group import pulse
from gpu_worker.settings import WorkerSettings
from tandem_contract import logs


@pytest.fixture(autouse=True)
def log_of_the_tests_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "tandem", "gpu_worker", "gpu_worker.checkpoint")]
    levels = [each.level for each in loggers]
    for module, name in ((warnings, "formatwarning"), (sys, "excepthook")):
        monkeypatch.setattr(module, name, getattr(module, name))
    yield
    logging.captureWarnings(False)
    logs.stop()
    for each, level in zip(loggers, levels, strict=True):
        each.setLevel(level)


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_ranks_of_a_host_warn_once_of_its_files_and_variables(
    local_rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = {"RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TANDEM_MODLE", "x")
    program.start_log(WorkerSettings(ranks=2), program.ranks_of(2))
    for module in (loading, files, tokenizer, pulse):
        logging.getLogger(module.__name__).warning("%s warns", module.__name__)
    logs.stop()
    lines = capfd.readouterr().err.splitlines()
    # Only what differs from rank to rank is logged by each.
    assert len(lines) == (1 if local_rank else 5)
    assert lines[-1].endswith("gpu_worker.group.pulse warns")
