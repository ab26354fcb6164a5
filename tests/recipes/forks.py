"""The process that imports the libraries once, and forks a process for each run of pytest. It is started as a file.

It knows nothing of the checkout: what it imports is what others wrote, and a fork imports the product from a copy.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

_ON_PATH = (".", "client", "protos", ".stubs")
_PRODUCT = ("scheduler_svc", "gpu_worker", "tandem_client", "tandem_contract", "tandem", "tests")


class _Outcomes:
    """Notes what became of each test."""

    _ORDER = ("skipped", "passed", "failed")

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def _note(self, report: Any) -> None:
        name = report.nodeid.partition("[")[0]
        self.found[name] = max(self.found.get(name, "skipped"), report.outcome, key=self._ORDER.index)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes a test's set-up, call or end."""
        if report.when == "call" or report.outcome != "passed":
            self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        """Notes the import of a file."""
        if report.outcome == "failed":
            self._note(report)


def _run(order: dict[str, Any]) -> None:
    """Runs pytest in this process."""
    folder = order["folder"]
    descriptor = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    paths = [os.path.normpath(os.path.join(folder, part)) for part in _ON_PATH]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    import pytest

    outcomes = _Outcomes()
    # The libraries of plugins are imported already.
    warnings = "ignore::pytest.PytestAssertRewriteWarning"
    options = ("-q", "-m=", "-pno:cacheprovider", f"-W{warnings}", "--tb=short")
    pytest.main([*options, f"--rootdir={folder}", *order["tests"]], plugins=[outcomes])
    # A test of the checkout's own source would prove nothing.
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in _PRODUCT and getattr(module, "__file__", None):
            assert str(module.__file__).startswith(f"{folder}/"), module.__file__
    Path(order["result"]).write_text(json.dumps(outcomes.found))


def main() -> None:
    """Imports the libraries that the arguments name, then forks a run for each line of the standard input."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        if not (pid := os.fork()):
            try:
                _run(json.loads(line))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(pid, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
