"""Edits of a definition's syntax tree, from which the mutations are made.

An edit names a definition, code in it, and the code to put there. Code is compared as a syntax tree: the layout of the
source and comments do not count. An edit is an error if its code does not occur exactly once in the definition.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from textwrap import indent
from typing import Any

_ANY = "_"


class MisplacedEdit(Exception):
    """The code of an edit does not occur exactly once in its definition, or the definition not once in the module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """`definition` is a qualified name in the module, `old` an expression or a statement; `_` in it is any expression.

    `new` takes the place of `old`: an expression, or statements if `old` is a statement.
    """

    definition: str
    old: str
    new: str


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Returns the source of the module with the edits applied, in order. Raises MisplacedEdit.

    The definition of an edit loses its layout and its comments; the rest of the module keeps them.
    """
    for edit in edits:
        text = _edited(text, edit)
    return text


def defines(text: str, qualified_name: str) -> bool:
    """Whether the module defines the name exactly once. Modules in which no line looks so are not parsed."""
    name = qualified_name.split(".")[-1]
    looks_so = name in text and re.search(rf"^ *(?:(?:async def|def|class) {name}\b|{name}\b.*=)", text, re.MULTILINE)
    return bool(looks_so) and len(_definitions(_parsed(text), qualified_name)) == 1


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _edited(text: str, edit: Edit) -> str:
    found = _definitions(_parsed(text), edit.definition)
    if len(found) != 1:
        raise MisplacedEdit(f"the module defines {edit.definition} {len(found)} times, not once")
    first = min(node.lineno for node in (found[0], *getattr(found[0], "decorator_list", ())))
    lines, last = text.splitlines(keepends=True), found[0].end_lineno
    source, margin = "".join(lines[first - 1 : last]), " " * found[0].col_offset
    # Parsed again, because the tree of the module is kept.
    body: Any = ast.parse(f"if True:\n{source}").body[0] if margin else ast.parse(source)
    within = ast.Module(body=body.body, type_ignores=[])
    (old,), new = ast.parse(edit.old).body, ast.parse(edit.new).body
    is_expression = isinstance(old, ast.Expr) and len(new) == 1 and isinstance(new[0], ast.Expr)
    pattern = old.value if is_expression and isinstance(old, ast.Expr) else old
    places = [node for node in ast.walk(within) if _fits(pattern, node)]
    if len(places) != 1:
        raise MisplacedEdit(f"{edit.old!r} occurs {len(places)} times in {edit.definition}, not once")
    if len(new) == 1 and ast.dump(old) == ast.dump(new[0]):
        raise MisplacedEdit(f"the edit of {edit.definition} changes nothing")
    swapped = _Swap(places[0], new[0].value if is_expression and isinstance(new[0], ast.Expr) else new).visit(within)
    lines[first - 1 : last] = indent(ast.unparse(swapped), margin) + "\n"
    return "".join(lines)


def _definitions(module: ast.Module, qualified_name: str) -> list[Any]:
    found: list[Any] = [module]
    for name in qualified_name.split("."):
        found = [node for parent in found for node in getattr(parent, "body", ()) if name in _names_defined(node)]
    return found


def _names_defined(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = (getattr(node, "name", None), *(getattr(target, "id", None) for target in targets))
    return (name for name in names if name)


def _fits(pattern: object, node: object) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id == _ANY:
        return isinstance(node, ast.expr)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _fits(getattr(pattern, field, None), getattr(node, field, None)) for field in pattern._fields
        )
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(map(_fits, pattern, node))
    return type(pattern) is type(node) and pattern == node


class _Swap(ast.NodeTransformer):
    """Puts other nodes in the place of one."""

    def __init__(self, old: ast.AST, new: ast.AST | list[ast.stmt]) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        return self._new if node is self._old else self.generic_visit(node)
