"""Edits of a definition's syntax tree, from which the mutations are made.

An edit names a definition, one place in it, and the change of that place. A place is named by what the code does there
(the method that is called, the attribute that is assigned), and not by the names of locals or by the layout of the
source. An edit is an error if its place does not occur exactly once in the definition.
"""

import ast
import builtins
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum, auto

Place = Callable[[ast.AST], Iterator[ast.expr]]
"""Yields the expressions at a node that the edit may change. It is called for each node of the definition."""


class MisplacedEdit(Exception):
    """The place of an edit does not occur exactly once, or its code uses a name that the definition does not use."""


class _Change(Enum):
    REPLACE = auto()
    DROP = auto()
    INSERT_BEFORE = auto()
    INSERT_AFTER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """`definition` is a qualified name in the module. `code` is the expression or the statement to put in.

    In `code`, `it` stands for the expression at the place. If it is an arithmetic operation, a comparison, or an `and`
    or `or` of two, `left` and `right` stand for its operands. If it is the call of a method, `owner` and `argument`
    stand for the object and the first argument. `target` stands for the left side of an assignment.
    """

    definition: str
    place: Place
    change: _Change
    code: str = ""


def replace(definition: str, place: Place, code: str) -> Edit:
    """Replaces the expression at the place."""
    return Edit(definition=definition, place=place, change=_Change.REPLACE, code=code)


def drop(definition: str, place: Place) -> Edit:
    """Removes the statement that only makes the call or only assigns the value at the place."""
    return Edit(definition=definition, place=place, change=_Change.DROP)


def insert_before(definition: str, place: Place, code: str) -> Edit:
    """Inserts a statement before the one that contains the place."""
    return Edit(definition=definition, place=place, change=_Change.INSERT_BEFORE, code=code)


def insert_after(definition: str, place: Place, code: str) -> Edit:
    """Inserts a statement after the one that contains the place."""
    return Edit(definition=definition, place=place, change=_Change.INSERT_AFTER, code=code)


# Places ---------------------------------------------------------------------------------------------------------------


def call(name: str) -> Place:
    """The call of a function or method. `name` may end with a part of the path: `host.evict`."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Call) and f".{ast.unparse(node.func)}".endswith(f".{name}"):
            yield node

    return found


def argument(name: str, which: int | str) -> Place:
    """One argument of a call, by position or keyword."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        for made in call(name)(node):
            assert isinstance(made, ast.Call)
            by_name: dict[int | str | None, ast.expr] = {keyword.arg: keyword.value for keyword in made.keywords}
            by_name |= dict(enumerate(made.args))
            if which in by_name:
                yield by_name[which]

    return found


def assigned(name: str) -> Place:
    """The value that is assigned or added to a variable of the module, to an attribute, or to an item of one."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Subscript):
                target = target.value
            if name in (getattr(target, "attr", None), getattr(target, "id", None)):
                yield node.value

    return found


def attribute(name: str) -> Place:
    """The use of an attribute."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Attribute) and node.attr == name:
            yield node

    return found


def condition(name: str) -> Place:
    """The condition of an `if` or `while` that uses an attribute or function of this name."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.If | ast.IfExp | ast.While) and _uses(node.test, name):
            yield node.test

    return found


def comparison(name: str) -> Place:
    """The comparison that uses an attribute or function of this name."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Compare) and _uses(node, name):
            yield node

    return found


def membership(node: ast.AST) -> Iterator[ast.expr]:
    """The test with `in` or `not in`."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        yield node


def difference(name: str) -> Place:
    """The subtraction from an attribute of this name."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _uses(node.left, name):
            yield node

    return found


def constant(value: object) -> Place:
    """The use of a constant."""

    def found(node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value:
            yield node

    return found


def returned(node: ast.AST) -> Iterator[ast.expr]:
    """The value that the definition returns."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.value


def _uses(node: ast.AST, name: str) -> bool:
    return any(name in (getattr(part, "attr", None), getattr(part, "id", None)) for part in ast.walk(node))


# Application ----------------------------------------------------------------------------------------------------------


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """Returns the source of the module with the edits applied, in order. Raises MisplacedEdit."""
    module = ast.parse(text)
    for edit in edits:
        _apply(module, edit)
    return ast.unparse(ast.fix_missing_locations(module))


def _apply(module: ast.Module, edit: Edit) -> None:
    definition = _find_definition(module, edit.definition)
    found = [expression for node in ast.walk(definition) for expression in edit.place(node)]
    if len(found) != 1:
        raise MisplacedEdit(f"the place of the edit occurs {len(found)} times in {edit.definition}, not once")
    it = found[0]
    # A nested statement comes after those that contain it.
    statement = [node for node in ast.walk(definition) if isinstance(node, ast.stmt) and it in ast.walk(node)][-1]
    if edit.change is _Change.DROP:
        if getattr(statement, "value", None) is not it or isinstance(statement, ast.Return):
            raise MisplacedEdit(f"the place of the edit is not a statement of its own in {edit.definition}")
        _Swap(statement, [ast.Pass()]).visit(module)
        return
    code = _filled(edit, definition, statement, it)
    if edit.change is _Change.REPLACE:
        assert isinstance(code, ast.Expr)
        _Swap(it, code.value).visit(module)
    else:
        is_before = edit.change is _Change.INSERT_BEFORE
        _Swap(statement, [code, statement] if is_before else [statement, code]).visit(module)


def _find_definition(module: ast.Module, qualified_name: str) -> ast.AST:
    found: list[ast.AST] = [module]
    for name in qualified_name.split("."):
        found = [node for parent in found for node in getattr(parent, "body", ()) if name in _names_defined(node)]
    if len(found) != 1:
        raise MisplacedEdit(f"the module defines {qualified_name} {len(found)} times, not once")
    return found[0]


def _names_defined(node: ast.stmt) -> list[str | None]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]


def _filled(edit: Edit, definition: ast.AST, statement: ast.stmt, it: ast.expr) -> ast.stmt:
    """Returns the statement of the edit's code, with the parts of `it` in place of their names."""
    parts = {"it": it}
    if isinstance(statement, ast.Assign):
        parts["target"] = statement.targets[0]
    match it:
        case ast.BinOp(left=left, right=right) | ast.Compare(left=left, comparators=[right]):
            parts |= {"left": left, "right": right}
        case ast.BoolOp(values=[left, right]):
            parts |= {"left": left, "right": right}
        case ast.Call(func=ast.Attribute(value=owner), args=arguments):
            parts |= {"owner": owner} | ({"argument": arguments[0]} if arguments else {})
        case _:
            pass
    (code,) = ast.parse(edit.code).body
    known = {getattr(node, "id", getattr(node, "arg", None)) for node in ast.walk(definition)} | set(dir(builtins))
    used = {node.id for node in ast.walk(code) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if unknown := used - known - set(parts):
        raise MisplacedEdit(f"{edit.definition} does not use {', '.join(sorted(unknown))}, as the edit's code does")
    return _Fill(parts).visit(code)


class _Fill(ast.NodeTransformer):
    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self._parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        # A part may be used more than once.
        return deepcopy(self._parts[node.id]) if node.id in self._parts else node


class _Swap(ast.NodeTransformer):
    """Puts other nodes in the place of one."""

    def __init__(self, old: ast.AST, new: ast.AST | list[ast.stmt]) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        return self._new if node is self._old else self.generic_visit(node)
