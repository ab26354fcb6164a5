"""All test runs: a folder of their own for compiled kernels, the programs' default ports held, and the order of files
in a run of several processes.

Files are given to the processes one by one: first those without a measured time, then the others from the longest to
the shortest, so that the processes end together. `make test-order` writes `file_seconds.json`.
"""

import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.rigs import preloaded, processes
from tests.rigs.busy_loops import busy_loops
from tests.rigs.cpu_quota import cpu_quota
from tests.rigs.default_ports import held_ports
from tests.rigs.forked_suite import ForkedSuite, share_of

# Before torch is imported. Inductor keeps kernels in the temporary folder otherwise, where other checkouts and users
# have theirs, and its precompiled headers (150 MB each) only there. This folder is kept from run to run.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".inductor_cache"))
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

# The tests start hundreds of Python processes, each of which would compile the sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A slow machine must fail no test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell ignores Ctrl-C for what it runs in the background, and nohup the end of the terminal. The programs that the
# tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# pytest's own.
_CURRENT_TEST = "PYTEST_CURRENT_TEST"
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FILE_SECONDS = Path(__file__).with_name("file_seconds.json")
# Shorter files are not in it.
_LEAST_SECONDS = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--jobs", type=int, default=1, help="run the tests in so many processes")
    parser.addoption("--save-file-seconds", action="store_true", help=f"write the seconds of files to {FILE_SECONDS}")
    parser.addoption("--busy-loops", type=int, default=0, help="run the tests beside so many busy loops")
    parser.addoption("--cores", type=float, default=0.0, help="hold each process that runs tests to so many cores")


def pytest_configure(config: pytest.Config) -> None:
    processes.may_fork = sys.platform == "linux"
    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(busy_loops(config.getoption("--busy-loops")))
    stack.enter_context(held_ports())
    jobs, cores = config.getoption("--jobs"), config.getoption("--cores")
    if config.getoption("--save-file-seconds"):
        config.pluginmanager.register(_Watch())
    if cores:
        try:
            # Each process that runs tests makes one of its own.
            with cpu_quota(cores):
                pass
        except OSError as error:
            raise pytest.UsageError(f"--cores: this user may make no control groups here: {error}") from None
    if jobs > 1:
        config.pluginmanager.register(ForkedSuite(jobs, [cpu_quota(cores)] if cores else []))
    elif cores:
        stack.enter_context(cpu_quota(cores))


@pytest.fixture(autouse=True)
def kept_process() -> Iterator[None]:
    """A program that a test runs in this process takes signals and sets variables; libraries set variables too.

    The programs of later tests would inherit both, and could not be forked from one that has imported. A fixture of
    more than one test sets no variables that its tests keep.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _give_back_variables()
    yield
    _give_back_variables()
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


# What the system has of `preloaded.environment`.
_encoded: dict[bytes, bytes] = {}


def _give_back_variables() -> None:
    # Nearly always nothing has changed; to read them as text takes four times as long.
    if {**os.environb, _CURRENT_TEST.encode(): b""} == {**_encoded, _CURRENT_TEST.encode(): b""}:
        return
    kept, found = preloaded.environment, dict(os.environ)
    for name in {*kept, *found} - {_CURRENT_TEST}:
        if name not in kept:
            del os.environ[name]
        elif found.get(name) != kept[name]:
            os.environ[name] = kept[name]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--jobs") > 1:
        known = json.loads(FILE_SECONDS.read_text())
        files = {item.nodeid.partition("::")[0]: share_of(item) for item in items}
        seconds = Counter[str]()
        for name, share in files.items():
            seconds[share] += known.get(name, float("inf"))
        items.sort(key=lambda item: (-seconds[share_of(item)], share_of(item), item.path))


def pytest_collection() -> None:
    # Nearly all that an import makes stays.
    gc.disable()


def pytest_collection_finish() -> None:
    preloaded.environment.update(os.environ)
    _encoded.update(os.environb)
    # What all tests and libraries are made of stays, so no collection need read it again.
    gc.collect()
    gc.freeze()
    gc.enable()


class _Watch:
    """Sums the seconds of each file."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: round(seconds) for name, seconds in self._seconds.items() if seconds >= _LEAST_SECONDS}
        FILE_SECONDS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
