"""Bounds on programs, folders, modules and functions, and the functions that are longer, which may only shrink."""

import ast
from collections import Counter

from tests.architecture.source import PROGRAMS, ROOT, files, tree

MAX_MODULES = 25
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
# Lines of a program's text in all languages. A number is raised by hand, in the commit that says what the lines buy.
LINES = {"client": 13_600, "gpu_worker": 23_800, "protos": 5_800, "scheduler_svc": 36_000}
# What is text of a program: its code, its messages, its templates and what it reads. A tokenizer is data.
SUFFIXES = {".py", ".cpp", ".h", ".proto", ".json", ".jinja"}
DATA = {"tokenizer.json"}
# Lines of the functions that are longer. A smaller number replaces one that has become too large.
LONG_FUNCTIONS: dict[str, int] = {}


def test_no_program_is_longer_than_its_budget() -> None:
    lines = {
        program: sum(
            len(path.read_text().splitlines())
            for path in (ROOT / program).rglob("*")
            if path.suffix in SUFFIXES and path.name not in DATA
        )
        for program in LINES
    }
    assert {name: count for name, count in lines.items() if not 0 < count <= LINES[name]} == {}


def test_no_folder_has_more_modules_than_the_limit() -> None:
    counts = Counter(str(path.parent) for path in files(*PROGRAMS) if path.name != "__init__.py")
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_module_is_longer_than_the_limit() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in files(*PROGRAMS)}
    assert {name: count for name, count in lines.items() if count > MAX_MODULE_LINES} == {}


def test_no_function_is_longer_than_the_limit() -> None:
    lines = {
        f"{path}:{function.name}": function.end_lineno - function.lineno + 1
        for path in files(*PROGRAMS)
        for function in ast.walk(tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.end_lineno is not None
    }
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == LONG_FUNCTIONS
