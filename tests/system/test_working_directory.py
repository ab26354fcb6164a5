"""Files of the working directory with names of libraries: no program and no process that one starts imports them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import PROGRAMS, ROOT, files, module_name, tree
from tests.rigs.shadowed_folder import environment, ran, shadowed
from tests.rigs.waiting import TIMEOUT_SECONDS

MAIN = '__name__ == "__main__"'
# Every module that is a program, by its file.
ENTRIES = {
    path: module_name(path).removesuffix(".__main__")
    for path in files(*PROGRAMS)
    if "__main__" in (ROOT / path).read_text()
    and any(isinstance(node, ast.If) and ast.unparse(node.test).replace("'", '"') == MAIN for node in tree(path).body)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shadowed(tmp_path)


def run(folder: Path, *command: str, **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(**changed),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def test_the_files_are_imported_without_protection(folder: Path) -> None:
    """Else the tests below would show nothing."""
    assert run(folder, "-c", "import random").returncode == 1
    # Python 3.13 imports linecache for -c before anything else.
    assert ran(folder).split()[0] in {"random", "linecache"}


def help_of(folder: Path, *command: str, **changed: str) -> None:
    """Runs a program that imports its modules and ends."""
    done = run(folder, *command, "--help", **changed)
    assert ran(folder) == "", done.stderr
    # Ray, which only the cluster's commands need, is not installed everywhere.
    assert done.returncode == 0 or "ray" in done.stderr, done.stderr


@pytest.fixture(scope="module")
def started() -> set[str]:
    """The modules that Python imports before any of ours."""
    return set(run(Path("/"), "-c", "import re, runpy, sys; print(*sys.modules)").stdout.split())


def spare(folder: Path, names: set[str]) -> None:
    """Leaves no files of these names."""
    for name in {name.partition(".")[0] for name in names}:
        (folder / f"{name}.py").unlink(missing_ok=True)


def test_every_program_imports_first_what_leaves_the_working_directory() -> None:
    """The package of the client's programs does it for them."""
    assert {entry.partition(".")[0] for entry in ENTRIES.values()} == {"scheduler_svc", "gpu_worker", "tandem_client"}
    others = [path for path, entry in ENTRIES.items() if not entry.startswith("tandem_client")]
    for path in (Path("client/tandem_client/__init__.py"), *others):
        first = next(node for node in tree(path).body if isinstance(node, ast.Import | ast.ImportFrom))
        assert ast.unparse(first).endswith(".import_path"), path


@pytest.mark.parametrize("entry", ["scheduler_svc.recording.flight", "gpu_worker.holder", "tandem_client.cli"])
def test_a_program_leaves_the_working_directory_without_the_flag(folder: Path, started: set[str], entry: str) -> None:
    """One of each package. Only this package, and what Python itself needs to start, could still be taken from there.

    An empty entry of PYTHONPATH, which also means the working directory, counts for nothing.
    """
    spare(folder, {entry, *started})
    help_of(folder, "-m", entry, PYTHONPATH=environment()["PYTHONPATH"] + os.pathsep)


def test_the_command_takes_an_empty_entry_of_pythonpath_for_nothing(folder: Path, started: set[str]) -> None:
    spare(folder, {"tandem_client", *started})
    script = Path(sys.executable).with_name("tandem")
    help_of(folder, str(script), PYTHONPATH=environment()["PYTHONPATH"] + os.pathsep)


def test_a_program_that_imports_the_client_keeps_its_path(tmp_path: Path) -> None:
    """As a script of the command's name, as a module, and as a package that imports it before Python runs it."""
    imports = (
        "import os, sys\nfound = sys.path[:], dict(os.environ)\nimport tandem_client\nprint(tandem_client.Client)\n"
    )
    keeps = f"{imports}assert found == (sys.path, os.environ) and {str(tmp_path)!r} in sys.path\n"
    (tmp_path / "tandem").write_text(keeps)
    (tmp_path / "tandem_client_of_mine").mkdir()
    for name in ("mine", "tandem_client_of_mine/__init__", "tandem_client_of_mine/__main__"):
        (tmp_path / f"{name}.py").write_text(keeps)
    for command in (["tandem"], ["-m", "mine"], ["-mtandem_client_of_mine", "-m", "tandem_client"]):
        done = run(tmp_path, *command, PYTHONPATH=environment()["PYTHONPATH"] + os.pathsep)
        assert done.returncode == 0 and done.stdout, done.stderr


PROGRAM = """
import multiprocessing, sys, types
if __name__ == "__main__":
    # As if it were a program of the worker.
    sys.modules["__main__"].__spec__ = types.SimpleNamespace(name="gpu_worker")
    import gpu_worker.process.import_path
    sys.modules["__main__"].__spec__ = None
    BODY
    print("done")
"""
OF_MULTIPROCESSING = """
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(len, ("abc",)) == 3
"""
OF_TORCH = """
    from torch._inductor.compile_worker.subproc_pool import SubprocPool
    pool = SubprocPool(1)
    assert pool.submit(len, "abc").result() == 3
    pool.shutdown()
"""


@pytest.mark.parametrize("body", [OF_MULTIPROCESSING, pytest.param(OF_TORCH, marks=pytest.mark.long)])
def test_processes_of_libraries_import_nothing_from_the_working_directory(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, body: str
) -> None:
    """Those of multiprocessing, and those in which torch compiles."""
    program = tmp_path_factory.mktemp("program") / "main.py"
    program.write_text(PROGRAM.replace("BODY", body.strip()))
    done = run(folder, str(program))
    assert ran(folder) == "", done.stderr
    assert done.stdout == "done\n", done.stderr
