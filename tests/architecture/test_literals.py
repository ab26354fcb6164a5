"""No string stands where a collection of strings is meant: `in ("x")` and `drop("x")` take single letters."""

import ast
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.architecture.source import PROGRAMS, ROOT, files, nodes

COLLECTIONS = frozenset(
    {"Iterable", "Collection", "Sequence", "Container", "Set", "AbstractSet", "list", "set", "frozenset"}
)
KINDS = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Compare, ast.For, ast.comprehension, ast.AnnAssign),
    ast.Call,
)
# Position and name of the parameters that are collections of strings, by the name of the function or the class.
Signatures = dict[str, set[tuple[int, str]]]


def takes_strings(annotation: ast.expr | None) -> bool:
    """Whether an annotation is a collection of strings, such as `Iterable[str]` or `tuple[str, ...] | None`."""
    if isinstance(annotation, ast.BinOp):
        sides = (annotation.left, annotation.right)
        has_text = any(isinstance(side, ast.Name) and side.id == "str" for side in sides)
        return not has_text and any(takes_strings(side) for side in sides)
    if not isinstance(annotation, ast.Subscript):
        return False
    outer, inner = annotation.value, annotation.slice
    name = outer.id if isinstance(outer, ast.Name) else outer.attr if isinstance(outer, ast.Attribute) else ""
    if isinstance(inner, ast.Tuple):
        inner = inner.elts[0]
    is_text = isinstance(inner, ast.Name) and inner.id == "str"
    return is_text and (name in COLLECTIONS or name == "tuple")


def is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def in_parentheses(node: ast.expr, lines: list[bytes]) -> bool:
    """Whether a literal stands in parentheses of its own, as the author of a tuple forgets the comma."""
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    before = b"\n".join(lines)[: starts[node.lineno - 1] + node.col_offset]
    after = b"\n".join(lines)[starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0) :]
    return before.rstrip().endswith(b"(") and after.lstrip().startswith(b")")


def checked(found: Iterable[ast.AST]) -> list[ast.AST]:
    """Those nodes that the check reads."""
    return [node for node in found if isinstance(node, KINDS)]


def signatures(read: list[ast.AST]) -> Signatures:
    """Those that any definition of a name has."""
    found: Signatures = {}

    def add(name: str, wanted: Iterable[tuple[int, str]]) -> None:
        found.setdefault(name, set()).update(wanted)

    for node in read:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            begin = 1 if names and names[0].arg in ("self", "cls") else 0
            at = [(i - begin, each) for i, each in enumerate(names)] + [(-1, each) for each in node.args.kwonlyargs]
            add(node.name, [(i, each.arg) for i, each in at if takes_strings(each.annotation)])
        elif isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            wanted = [
                (i, each.target.id)
                for i, each in enumerate(fields)
                if isinstance(each.target, ast.Name) and takes_strings(each.annotation)
            ]
            add(node.name, wanted)
    return found


def letters(read: list[ast.AST], source: str, own: Signatures, known: Signatures) -> Iterator[int]:
    """The lines where a string stands for a collection. `own`: of the module, `known`: of all modules."""
    lines = source.encode().split(b"\n")
    for node in read:
        if isinstance(node, ast.Compare):
            for operator, right in zip(node.ops, node.comparators, strict=True):
                if isinstance(operator, ast.In | ast.NotIn) and is_text(right) and in_parentheses(right, lines):
                    yield node.lineno
        elif isinstance(node, ast.For | ast.comprehension) and is_text(node.iter) and in_parentheses(node.iter, lines):
            yield node.iter.lineno
        elif isinstance(node, ast.AnnAssign) and takes_strings(node.annotation) and is_text(node.value):
            yield node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [*node.args.posonlyargs, *node.args.args]
            pairs = [*zip(names[::-1], node.args.defaults[::-1], strict=False)]
            pairs += [
                (each, value) for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
            ]
            yield from (value.lineno for each, value in pairs if takes_strings(each.annotation) and is_text(value))
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # A private name is that of the module itself.
            for position, keyword in (own if name.startswith("_") else known).get(name, ()):
                given = [node.args[position]] if 0 <= position < len(node.args) else []
                given += [each.value for each in node.keywords if each.arg == keyword]
                yield from (each.lineno for each in given if is_text(each))


def test_no_string_stands_for_a_collection_of_strings() -> None:
    read = {path: checked(nodes(path)) for path in files(*PROGRAMS)}
    own = {path: signatures(each) for path, each in read.items()}
    known: Signatures = {}
    for each in own.values():
        for name, wanted in each.items():
            known.setdefault(name, set()).update(wanted)
    found = [
        f"{path}:{line}"
        for path, each in own.items()
        for line in letters(read[path], (ROOT / path).read_text(), each, known)
    ]
    assert found == []


WRONG = [
    'x in ("a")',
    'x not in ("a")',
    'x in (\n    "a"\n)',
    'for x in ("a"): pass',
    '[x for x in ("a")]',
    'x: Collection[str] = "a"',
    'x: tuple[str, ...] | None = ("a")',
    'def f(x: Sequence[str] = "a"): pass',
    'def f(x: Iterable[str]): pass\nf("a")',
    'class C:\n    def f(self, x: Set[str]): pass\nc.f("a")',
    'class C:\n    x: int\n    y: frozenset[str]\nC(1, "a")',
    'def f(*, x: list[str]): pass\nf(x="a")',
    'def f(x: Iterable[str]): pass\nf(f"{a}")',
]
RIGHT = [
    'x in ("a",)',
    'x in "abc"',
    'x in ("a", "b")',
    'f("a") in ("b",)',
    'x: str = ("a")',
    'def f(x: Iterable[str] | str): pass\nf("a")',
    'def f(*x: str): pass\nf("a")',
    'def f(x: Iterable[str]): pass\nf(["a"])',
]


@pytest.mark.parametrize(
    ("source", "is_wrong"), [*((each, True) for each in WRONG), *((each, False) for each in RIGHT)]
)
def test_the_check_finds_each_form(source: str, is_wrong: bool) -> None:
    read = checked(ast.walk(ast.parse(source)))
    own = signatures(read)
    assert bool(list(letters(read, source, own, own))) == is_wrong


def test_the_check_reads_all_programs() -> None:
    assert {Path(path).parts[0] for path in files(*PROGRAMS)} == {Path(each).parts[0] for each in PROGRAMS}
