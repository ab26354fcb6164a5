"""No test judges by wall time: no assertion orders values that were read from a clock. CPU time is not wall time.

What is promised in time is measured in `tests/measure`; a test asserts an order of events, counts them, or gives the
code a clock of its own. Times are followed through assignments, lists and returned values of one file.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import settings

from tests.architecture.source import ROOT, files, tree

CLOCKS = {"monotonic", "perf_counter", "time"}
CLOCK = "a clock"
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# By file, with the reason.
EXCEPTIONS = {
    "tests/gpu_worker/constraints/rig.py": "ends a wait for answers",
    "tests/scheduler_svc/frontend/constraints/test_trials.py": "the time in which a trial is killed",
    "tests/scheduler_svc/frontend/rpc/test_held_refusals.py": "a least time, which a busy machine can only make longer",
    "tests/scheduler_svc/frontend/test_lifecycle.py": "a least time, which a busy machine can only make longer",
    "tests/scheduler_svc/frontend/test_health.py": "dates, between two readings of the clock",
    "tests/scheduler_svc/metrics/test_core_meter.py": "a date, between two readings of the clock",
    "tests/scheduler_svc/metrics/test_http_server.py": "a least time, which a busy machine can only make longer",
    "tests/system/test_gateway.py": "waits of a polite tenant beside a greedy one",
    "tests/system/test_resume.py": "a least time, which a busy machine can only make longer",
}


def reads_clock(node: ast.AST) -> bool:
    """Whether it is a call of a clock, by `time.` or of an event loop, in seconds or nanoseconds."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = ast.unparse(node.func.value)
    return node.func.attr.removesuffix("_ns") in CLOCKS and (owner == "time" or owner.endswith(("loop", "loop()")))


def sources(code: ast.AST | None) -> set[str]:
    """The names and attributes in an expression, and CLOCK if it reads one."""
    nodes = list(ast.walk(code)) if code is not None else []
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}
    return names | ({CLOCK} if any(map(reads_clock, nodes)) else set())


def flow(node: ast.AST) -> tuple[list[ast.expr], set[str]]:
    """What gets a value by this statement or call, and where the value comes from."""
    match node:
        case ast.Assign():
            return node.targets, sources(node.value)
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            return [node.target], sources(node.value)
        case ast.Call(func=ast.Attribute(attr="append")):
            return [node.func.value], sources(ast.Tuple(node.args))
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            return [ast.Name(node.name)], sources(ast.Tuple(returned))
    return [], set()


def times(code: ast.AST) -> set[str]:
    """The names in a piece of code that hold times of a clock."""
    flows = list[tuple[set[str], set[str]]]()
    for node in ast.walk(code):
        receivers, found = flow(node)
        names = [name for each in receivers for name in (each.elts if isinstance(each, ast.Tuple) else [each])]
        flows.append(({ast.unparse(name) for name in names}, found))
    known, count = {CLOCK}, 0
    while count < len(known):
        count = len(known)
        for names, found in flows:
            known |= names if found & known else set()
    return known


def judged(code: ast.AST) -> Iterator[int]:
    """The lines of assertions that order times, or compare them with `pytest.approx`."""
    known = times(code)
    for node in ast.walk(code):
        if isinstance(node, ast.Assert):
            compared = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
            orders = [each for each in compared if isinstance(each.ops[0], ORDERS) or "approx(" in ast.unparse(each)]
            if any(known & sources(each) for each in orders):
                yield node.lineno


def test_no_assertion_judges_a_time() -> None:
    measuring = Path("tests/measure")
    found = [
        f"{path}:{line}"
        for path in files("tests")
        if (measuring not in path.parents or path.name.startswith("test_")) and str(path) not in EXCEPTIONS
        # Most files read no clock, and need not be parsed.
        if any(f".{clock}" in (ROOT / path).read_text() for clock in CLOCKS)
        for line in judged(tree(path))
    ]
    assert found == []


def test_times_are_followed() -> None:
    code = """
def run_all():
    began = time.monotonic()
    return time.monotonic() - began
def test():
    alone, ages = run_all(), []
    ages.append(loop().time() - alone)
    limit: float = 2 * alone
    {}
"""
    wrong = (
        "time.time() < 5",
        "alone < 2",
        "max(ages) <= 1",
        "0 < limit",
        "alone == pytest.approx(3)",
        "run_all() > 1",
    )
    for assertion in wrong:
        assert list(judged(ast.parse(code.format(f"assert {assertion}")))) == [9], assertion
    for assertion in ("len(seen) < 5", "now == 7"):
        assert list(judged(ast.parse(code.format(f"assert {assertion}")))) == [], assertion


def test_no_generated_test_has_a_time_limit():
    assert settings().deadline is None
    limits = re.compile(r"@settings\([^)]*\bdeadline=")
    assert [path for path in files("tests") if limits.search((ROOT / path).read_text())] == []
