"""Docstrings and comments have a subject, and a time says its unit and its clock, where a program can see that."""

import ast
import itertools
import re
from collections.abc import Iterator

import pytest

from tests.architecture.source import PROGRAMS, ROOT, files, parsed

# Names of a moment, and of a duration, for floats. The name of a duration may end with its unit, and then says enough.
# `now` is on the clock of the caller: in the core, on the core's.
MOMENT = re.compile(
    r"(^|_)(at|until|since|deadline|due|expires|expiry|began|begun|when|wake|last_look|moment|seating|unix_time|now)$"
)
DURATION = re.compile(r"(^|_)(wait|waited|age|timeout|pause|delay|elapsed|duration|took|interval|lasted)$")
# What names them: a clock says its unit where it is described, and all clocks of this code count seconds.
CLOCK = re.compile(r"\bclocks?\b|\bUnix\b|\bmonotonic\b|\bperf_counter\b|\b(core|loop|simulation)'s time\b|`now`", re.I)
UNIT = re.compile(r"\b(milli)?seconds?\b|\bminutes?\b|(?<![\w'])[mun]?s\b", re.I)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_float(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("float", "float | None", "None | float")


def is_vague(name: str, text: str) -> bool:
    """Whether neither the name of a float nor the text about it says how its time is measured."""
    if MOMENT.search(name):
        return "unix" not in name and not CLOCK.search(text)
    return bool(DURATION.search(name)) and not (UNIT.search(text) or CLOCK.search(text))


def beside(lines: list[str], node: ast.stmt, following: ast.stmt | None) -> str:
    """Returns the comments above a field or after it, and the string below it.

    A comment counts for the fields that follow it without a line between.
    """
    above = reversed(lines[: node.lineno - 1])
    block = list(itertools.takewhile(lambda line: re.match(r"\s*(#|[\w.]+: )", line), above))
    comments = [line for line in block if line.lstrip().startswith("#")]
    below = following.value if isinstance(following, ast.Expr) else None
    after = lines[node.lineno - 1].partition("#")[2]
    return " ".join([*comments, after, str(below.value) if isinstance(below, ast.Constant) else ""])


def annotated(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AnnAssign, ast.stmt | None]]:
    """Yields each annotated float: its name, the statement, and the one after it."""
    for node, following in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and is_float(node.annotation):
            yield ast.unparse(node.target).removeprefix("self."), node, following


def vague_times(source: str) -> Iterator[str]:
    """Yields each float time of a file without unit or clock: fields, parameters and results, as `line name`."""
    lines, module = source.split("\n"), parsed(source)
    class_texts: dict[ast.AST, str] = {}
    for outer in ast.walk(module):
        if isinstance(outer, ast.ClassDef):
            text = ast.get_docstring(outer) or ""
            class_texts |= {node: text for node in outer.body if isinstance(node, Function)}
            for name, node, following in annotated(outer.body):
                if is_vague(name, f"{text} {beside(lines, node, following)}"):
                    yield f"{node.lineno} {outer.name}.{name}"
    for outer in ast.walk(module):
        if not isinstance(outer, Function):
            continue
        text = f"{class_texts.get(outer, '')} {ast.get_docstring(outer) or ''}"
        for name, node, following in annotated(outer.body):
            if is_vague(name, f"{text} {beside(lines, node, following)}"):
                yield f"{node.lineno} {outer.name}: {name}"
        has_flags = any(ast.unparse(decorator).startswith("flags.takes(") for decorator in outer.decorator_list)
        if has_flags or not ast.get_docstring(outer):
            continue
        for parameter in (*outer.args.args, *outer.args.kwonlyargs):
            if parameter.arg != "now" and is_float(parameter.annotation) and is_vague(parameter.arg, text):
                yield f"{outer.lineno} {outer.name}({parameter.arg})"
        if is_float(outer.returns) and is_vague(outer.name, text):
            yield f"{outer.lineno} {outer.name}()"


def without_subject(source: str) -> Iterator[int]:
    """Yields the lines of comments and docstrings, those of fields included, that begin as a genitive."""
    yield from (number for number, line in enumerate(source.split("\n"), 1) if re.search(r"(^|  )\s*# Of ", line))
    for node in ast.walk(parsed(source)):
        text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text, str) and text.lstrip().startswith("Of "):
            yield node.lineno


def test_docstrings_and_comments_have_a_subject() -> None:
    found = [f"{path}:{line}" for path in files(*PROGRAMS) for line in without_subject((ROOT / path).read_text())]
    assert found == []


def test_docstrings_of_the_tests_have_a_subject() -> None:
    texts = [(path, (ROOT / path).read_text()) for path in files("tests")]
    assert [str(path) for path, text in texts if re.search(r'^\s*"""Of ', text, re.M)] == []


def test_times_say_unit_and_clock() -> None:
    found = [f"{path}:{time}" for path in files(*PROGRAMS) for time in vague_times((ROOT / path).read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "vague"),
    [
        ("class A:\n    since: float", ["2 A.since"]),
        ("class A:\n    since: float  # Unix time", []),
        ("class A:\n    # By the loop's clock.\n    since: float\n    sent_at: float | None", []),
        ("class A:\n    since: float  # Unix time\n    until: float", ["3 A.until"]),
        ('class A:\n    since: float\n    """When it began."""', ["2 A.since"]),
        ('class A:\n    """Times are on the core\'s clock."""\n    since: float', []),
        ("class A:\n    timeout: float\n    timeout_ms: float", ["2 A.timeout"]),
        ("class A:\n    def __init__(self):\n        self._due_at: float = 0.0", ["3 __init__: _due_at"]),
        ('def f(until: float):\n    """Waits."""', ["1 f(until)"]),
        ('def f(until: float):\n    """Waits until then, by time.monotonic()."""', []),
        ('def next_wake() -> float | None:\n    """When it is due."""', ["1 next_wake()"]),
        ('def wait(timeout: float, now: float):\n    """timeout: seconds."""', []),
    ],
)
def test_a_time_without_clock_or_unit_is_found(source: str, vague: list[str]) -> None:
    assert list(vague_times(source)) == vague


@pytest.mark.parametrize(
    "source", ['"""Of it."""', 'class A:\n    a: int\n    """Of a user."""', 'def f():\n    "Of f."']
)
def test_a_docstring_without_subject_is_found(source: str) -> None:
    assert list(without_subject(source))
