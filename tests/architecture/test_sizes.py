"""Bounds on programs, folders, modules, functions and branches, with what is above them, which may only shrink."""

import ast
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.architecture.source import PROGRAMS, ROOT, files, nodes, tree

MAX_MODULES = 25
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60
# Lines of a program's text in all languages. A number is raised by hand, in the commit that says what the lines buy.
LINES = {"client": 13_020, "gpu_worker": 22_960, "protos": 5_800, "scheduler_svc": 34_530}
# What is text of a program: its code, its messages, its templates and what it reads. A tokenizer is data.
SUFFIXES = {".py", ".cpp", ".h", ".proto", ".json", ".jinja"}
DATA = {"tokenizer.json"}
# Lines of the functions that are longer. A smaller number replaces one that has become too large.
LONG_FUNCTIONS: dict[str, int] = {}
MAX_COMPLEXITY = 12
# Functions with more.
COMPLEX = {
    "operations/operators.py:load_of": 15,
    "operations/weights.py:Updates._follow": 17,
    "pages/lane_pages.py:LabelQueue.take": 14,
    "schedule/admit.py:admit": 23,
    "schedule/planner.py:_decide": 20,
    "schedule/planner.py:make_room": 14,
    "schedule/results.py:OutputCollector.deliver": 13,
    "schedule/results.py:read_result": 18,
    "schedule/trials.py:trial_lane": 17,
    "state/lane.py:cache_full_pages": 16,
    "steps.py:Steps.read": 13,
    "suspicion/suspects.py:Suspects.implicate": 13,
    "suspicion/suspects.py:Suspects.next_trial": 15,
    "waits.py:Waits.tell": 26,
}
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


def complexity(function: ast.AST) -> int:
    """McCabe's number with each operand of `and` and `or`, and each loop and condition of a comprehension."""
    count, nodes = 1, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        nodes += ast.iter_child_nodes(node)
    return count


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yields each function with its name in its classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield inner, child
            yield from functions(child, inner)


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
        for function in nodes(path)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.end_lineno is not None
    }
    assert {name: count for name, count in lines.items() if count > MAX_FUNCTION_LINES} == LONG_FUNCTIONS


def test_no_function_of_the_core_has_more_branches_than_the_limit() -> None:
    found = {
        f"{path.relative_to('scheduler_svc/core')}:{name}": complexity(function)
        for path in files("scheduler_svc/core")
        for name, function in functions(tree(path))
        # They list what they check.
        if path.name != "invariants.py" and not name.endswith(".audit")
    }
    assert {name: count for name, count in found.items() if count > COMPLEX.get(name, MAX_COMPLEXITY)} == {}
    assert COMPLEX.keys() <= found.keys(), "a function that is gone is listed"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("return 1", 1),
        ("if a:\n        return 1\n    elif b:\n        return 2", 3),
        ("return a if b and c or d else e", 4),
        ("return [x for x in a if x if y for z in b]", 5),
        ("for x in a:\n        while b:\n            assert c", 4),
        ("try:\n        a()\n    except E:\n        pass\n    except F:\n        pass", 3),
        ("match a:\n        case 1:\n            pass\n        case _:\n            pass", 3),
        ("def inner():\n        if a:\n            pass", 1),
    ],
)
def test_branches_are_counted(code: str, count: int) -> None:
    assert complexity(ast.parse(f"def f(a, b):\n    {code}\n").body[0]) == count
