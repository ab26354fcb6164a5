"""Applies a mutation to a copy of the source and runs the checks on it until one fails.

Owns the copy, in a directory of its own, and the processes that run in it. Never changes the checkout.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from tests.mutations.mutation import ROOT, Mutation

_COPIED = ("scheduler_svc", "gpu_worker", "client", "protos", "tests")
_ON_PATH = (".", "client", "protos", ".stubs")
# Mutated code may run forever; the checks of the unchanged source need far less.
_LIMIT_SECONDS = 900.0
_NARROW_LIMIT_SECONDS = 90.0
# A check of the checkout's own source proves nothing.
_IMPORTED = ("scheduler_svc", "gpu_worker", "tandem_client", "tandem_contract")
_WHICH = f"from importlib.util import find_spec; print(*(find_spec(name).origin for name in {_IMPORTED}))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that exits with 0 if its check passes."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float = _LIMIT_SECONDS


_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line")
SIMULATION = Check(name="simulation", command=("-m", "tests.simulation", "0", "--seeds", "200"))
CORE_TESTS = Check(name="core tests", command=(*_PYTEST, "tests/scheduler_svc/core"))


def checks_of(mutation: Mutation) -> tuple[Check, ...]:
    """The checks of which at least one must detect the mutation."""
    return (_narrow_check(mutation.tests, _NARROW_LIMIT_SECONDS),) if mutation.tests else (SIMULATION, CORE_TESTS)


def checks_of_the_source(chosen: Sequence[Mutation]) -> tuple[Check, ...]:
    """All checks of these mutations; they pass if nothing is changed."""
    tests = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
    narrow = (_narrow_check(tests, _LIMIT_SECONDS),) if tests else ()
    return (*narrow, SIMULATION, CORE_TESTS) if any(not mutation.tests for mutation in chosen) else narrow


def _narrow_check(tests: tuple[str, ...], limit_seconds: float) -> Check:
    return Check(name="its test", command=(*_PYTEST, "-m", "", *tests), limit_seconds=limit_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`caught_by` names the check that failed, `detail` its error. `caught_by` is empty if the mutation survived."""

    caught_by: str
    detail: str
    seconds: float


def judge(mutation: Mutation | None, checks: tuple[Check, ...]) -> Verdict:
    """Runs the checks on the mutated source, or on the unchanged source for None. Raises MisplacedEdit."""
    with TemporaryDirectory(prefix="tandem-mutation-", ignore_cleanup_errors=True) as name:
        copy = Path(name).resolve()
        for part in _COPIED:
            # The compiled modules, too: a process that starts does not compile what is unchanged.
            shutil.copytree(ROOT / part, copy / part)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / ".stubs").symlink_to(ROOT / ".stubs")
        if mutation is not None:
            path, text = mutation.applied()
            (copy / path).write_text(text)
        return _judge(copy, checks)


def _judge(copy: Path, checks: tuple[Check, ...]) -> Verdict:
    imported = _run(copy, Check(name="import", command=("-c", _WHICH)))[1].split()
    assert len(imported) == len(_IMPORTED) and all(path.startswith(f"{copy}/") for path in imported), imported
    started = time.monotonic()
    for check in checks:
        status, output = _run(copy, check)
        if status is None:
            detail = f"still running after {check.limit_seconds:.0f} s"
        elif status:
            detail = _reason(output)
        else:
            continue
        return Verdict(caught_by=check.name, detail=detail, seconds=time.monotonic() - started)
    return Verdict(caught_by="", detail="", seconds=time.monotonic() - started)


def _run(copy: Path, check: Check) -> tuple[int | None, str]:
    """Returns the exit status, or None if the time was over, and the output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(copy / part) for part in _ON_PATH),
        "OMP_NUM_THREADS": "1",
        "TEST_WAIT_SECONDS": "20",
        "TORCHINDUCTOR_CACHE_DIR": str(ROOT / ".inductor_cache"),
    }
    # A file: processes that a test has left behind would hold a pipe open.
    with TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *check.command],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(check.limit_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read()


def _reason(output: str) -> str:
    """The error of a failed seed or test, and its place."""
    lines = [line.strip() for line in output.splitlines()] or ["it printed nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    errors = [line for line in lines if line.startswith("AssertionError") or "Error: " in line]
    where = [line for line in lines if line.startswith("seed ") and "failed after" in line]
    return "; ".join([*where[:1], *(failed[:1] or (errors or lines)[-1:])])[:240]
