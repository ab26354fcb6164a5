"""Bounds on folders, modules and functions, with the functions that are longer today, which may only shrink."""

import ast
from collections import Counter

from tests.architecture.source import PROGRAMS, ROOT, files, tree

MAX_MODULES = 25
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
# Lines of the functions that are longer. A smaller number replaces one that has become too large.
LONG_FUNCTIONS: dict[str, int] = {}


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
