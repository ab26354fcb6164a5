"""All test runs: a folder of their own for compiled kernels, and the order of files in a run of several processes.

Files are given to the processes one by one: first short ones, and those that nobody has measured, then the others from
the longest to the shortest, so that the processes end together. `make test-order` writes `file_seconds.json`.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

# Before torch is imported. Inductor keeps kernels in the temporary folder otherwise, where other checkouts and users
# have theirs, and its precompiled headers (150 MB each) only there. This folder is kept from run to run.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".inductor_cache"))
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# The tests start hundreds of Python processes, each of which would compile the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

FILE_SECONDS = Path(__file__).with_name("file_seconds.json")
# Shorter files are not in it.
_LEAST_SECONDS = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--save-file-seconds", action="store_true", help=f"write the seconds of each file to {FILE_SECONDS}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--save-file-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watch())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        known = json.loads(FILE_SECONDS.read_text())
        names = {item.path: item.nodeid.partition("::")[0] for item in items}
        items.sort(key=lambda item: (-known.get(names[item.path], float("inf")), names[item.path]))


class _Watch:
    """Sums the seconds of each file."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(seconds) for name, seconds in self._seconds.items() if seconds >= _LEAST_SECONDS}
        FILE_SECONDS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
