"""Design rules that the source must obey."""

import ast
import configparser
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source import PROGRAMS, ROOT, files, imports, module_name, nodes, tree
from tests.gpu.parts import FILES, WORKER_TESTS, parts
from tests.rigs.default_ports import DEFAULT_PORTS

EVERY_FILE = files(*PROGRAMS)
# Formats that execute code on reading.
CODE_RUNNING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_never_import_each_other(program: str) -> None:
    packages = {"scheduler_svc", "gpu_worker", "tandem_client", "tests"}
    others = packages - {"tandem_client" if program == "client" else program}
    found = {
        str(path): sorted(names)
        for path in files(program)
        if (names := {name for name in imports(path) if name.split(".")[0] in others})
    }
    assert found == {}


def test_the_client_imports_only_the_public_stubs() -> None:
    found = {str(path) for path in files("client") for name in imports(path) if "internal" in name.split(".")}
    assert found == set()


def test_no_module_reads_a_format_that_executes_code() -> None:
    found = {
        str(path): sorted(names)
        for path in EVERY_FILE
        if (names := {name for name in imports(path) if name.split(".")[0] in CODE_RUNNING})
    }
    assert found == {}
    calls = {
        f"{path}:{node.lineno}"
        for path in EVERY_FILE
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in ("load", "save", "recv_pyobj")
        and ast.unparse(node) in ("torch.load", "torch.save", "socket.recv_pyobj", "np.load")
    }
    assert calls == set()


def test_package_files_import_nothing() -> None:
    found = [str(path) for path in EVERY_FILE if path.name == "__init__.py" and imports(path)]
    assert found == ["client/tandem_client/__init__.py"]


def test_every_module_has_a_docstring() -> None:
    found = [str(path) for path in EVERY_FILE if tree(path).body and ast.get_docstring(tree(path)) is None]
    assert found == []


def test_no_module_has_a_catch_all_name() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert [str(path) for path in EVERY_FILE if drawers & set(module_name(path).split("."))] == []


def test_importing_reads_no_environment() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in EVERY_FILE
        for node in _at_import(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert found == []


def _at_import(module: ast.Module) -> list[ast.AST]:
    """Returns the nodes that run on import: no function bodies, and not the body of `if __name__ == "__main__"`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [module]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            script = isinstance(child, ast.If) and "__name__" in ast.unparse(child.test)
            if not script and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                found.append(child)
                waiting.append(child)
    return found


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in files("tests")}
    assert sorted(str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()) == []


def test_the_top_level_contains_only_the_design_folders() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    visible = {Path(line).parts[0] for line in listed.splitlines()}
    folders = {*(Path(program).parts[0] for program in PROGRAMS), "tests"}
    assert {name for name in visible if not name.startswith(".")} == folders | {
        "LICENSE",
        "Makefile",
        "README.md",
        "pyproject.toml",
    }
    assert [folder for folder in sorted(folders) if not (ROOT / folder / "README.md").is_file()] == []


def test_the_tests_hold_every_default_port() -> None:
    """A port that a program names as an address of its own code is one at which a test might start it."""
    address = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1?\]|0\.0\.0\.0)?:(\d+)")
    texts = [
        node.value
        for path in EVERY_FILE
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    ports = {int(found[1]) for text in texts if (found := address.fullmatch(text.removeprefix("tcp://")))}
    assert ports - {0} == set(DEFAULT_PORTS)


def test_every_worker_test_file_belongs_to_one_part_of_a_gpu_run() -> None:
    def files_of(path: Path) -> list[Path]:
        return sorted(path.rglob("test_*.py")) if path.is_dir() else [path]

    root = ROOT / WORKER_TESTS
    assert sorted(file for names in FILES.values() for name in names for file in files_of(root / name)) == files_of(
        root
    )
    names = [part.name for part in parts()]
    assert len(set(names)) == len(names)


def test_every_run_of_pytest_imports_from_the_same_folders() -> None:
    """Those that are not in the default suite would notice a new folder months later."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    for path in sorted((ROOT / "tests").glob("*/pytest.ini")):
        settings = configparser.ConfigParser()
        settings.read(path)
        folders = settings["pytest"]["pythonpath"].split()
        assert {(path.parent / folder).resolve() for folder in folders} == {(ROOT / one).resolve() for one in ours}, (
            path
        )
