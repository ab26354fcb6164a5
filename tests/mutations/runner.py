"""Applies a mutation to a copy of the source and runs the checks on it until one fails.

Owns the copy, in a directory of its own, and the processes that run in it. Never changes the checkout.
"""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations.edits import MisplacedEdit, edited
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[2]
# The files that the checks below import.
_COPIED = (
    *(
        "scheduler_svc",
        "protos/tandem_contract",
        "tests/__init__.py",
        "tests/rigs",
        "tests/simulation",
        "tests/scheduler_svc",
    ),
    *("tests/system/__init__.py", "tests/system/asks.py"),
)
# A mutated core may run forever; the checks of the unchanged core need far less.
_LIMIT_SECONDS = 900.0
_NARROW_LIMIT_SECONDS = 60.0
_IGNORED = shutil.ignore_patterns("__pycache__")
# Prints which source is imported, because a check of the checkout's own source proves nothing.
_WHICH = "import scheduler_svc.core.scheduler as module; print(module.__file__)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that exits with 0 if its check passes."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float = _LIMIT_SECONDS


SIMULATION = Check(name="simulation", command=("-m", "tests.simulation", "0", "--seeds", "200"))
CORE_TESTS = Check(
    name="core tests",
    command=("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "tests/scheduler_svc/core"),
)


def narrow_check(test: str) -> Check:
    """The check that runs only the named tests."""
    command = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "", *test.split())
    return Check(name="its test", command=command, limit_seconds=_NARROW_LIMIT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`caught_by` names the check that failed, `detail` its error. `caught_by` is empty if the mutation survived."""

    caught_by: str
    detail: str
    seconds: float


def mutated(mutation: Mutation, text: str) -> str:
    """Returns the module's text with the mutation applied. Raises MisplacedEdit."""
    try:
        return edited(text, mutation.edits)
    except MisplacedEdit as error:
        raise MisplacedEdit(f"mutation {mutation.name} of {mutation.module}: {error}") from None


def judge(mutation: Mutation | None, checks: tuple[Check, ...]) -> Verdict:
    """Runs the checks on the mutated source, or on the unchanged source for None. Raises MisplacedEdit."""
    with TemporaryDirectory(prefix="tandem-mutation-") as name:
        copy = Path(name)
        _make_copy(copy)
        if mutation is not None:
            path = copy / mutation.path
            path.write_text(mutated(mutation, path.read_text()))
        return _judge(copy, checks)


def _make_copy(copy: Path) -> None:
    for part in _COPIED:
        source, target = ROOT / part, copy / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_IGNORED)
        else:
            shutil.copy(source, target)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / ".stubs").symlink_to(ROOT / ".stubs")


def _judge(copy: Path, checks: tuple[Check, ...]) -> Verdict:
    environment = os.environ | {"PYTHONPATH": f"{copy}:{copy / 'protos'}:{copy / '.stubs'}", "OMP_NUM_THREADS": "1"}
    which = _run(copy, environment, ("-c", _WHICH))
    if which.returncode or not which.stdout.startswith(f"{copy}/"):
        return Verdict(caught_by="import", detail=_last_line(which.stderr), seconds=0.0)
    started = time.monotonic()
    for check in checks:
        try:
            done = _run(copy, environment, check.command, check.limit_seconds)
        except subprocess.TimeoutExpired:
            detail = f"still running after {check.limit_seconds:.0f} s"
            return Verdict(caught_by=check.name, detail=detail, seconds=time.monotonic() - started)
        if done.returncode:
            detail = _reason(done.stdout) or _last_line(done.stderr)
            return Verdict(caught_by=check.name, detail=detail, seconds=time.monotonic() - started)
    return Verdict(caught_by="", detail="", seconds=time.monotonic() - started)


def _run(
    copy: Path, environment: dict[str, str], command: tuple[str, ...], limit_seconds: float = _LIMIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_seconds,
        check=False,
    )


def _reason(output: str) -> str:
    """The error of a failed seed or test, and its place."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if line.startswith(("AssertionError", "FAILED")) or "Error: " in line]
    where = [line for line in lines if line.startswith("seed ") and "failed after" in line]
    return "; ".join([*where[:1], *errors[-1:]])[:240]


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:240] if lines else "it printed nothing"
