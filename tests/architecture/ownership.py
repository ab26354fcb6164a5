"""Finds code that changes the state of another object: the rule of `scheduler_svc/core`, read from the source.

Owns the rule. Allowed are stores into `self.name` and `self.name[...]`, into locals, and into what the function has
just created itself; a store or a mutating call that reaches further changes state that another class owns.
"""

import ast
from collections.abc import Iterator

# Methods that change a list, dict, set, deque, bytearray or array in place.
MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "fill"),
        *("insert", "intersection_update", "itemset", "move_to_end", "partition", "pop", "popitem", "popleft", "put"),
        *("remove", "resize", "reverse", "setdefault", "sort", "symmetric_difference_update", "update"),
    }
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FRESH = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def foreign_stores(module: ast.Module) -> list[tuple[int, str]]:
    """(line, code) of each statement or call that changes the state of an object that the function did not create."""
    found = [
        (node.lineno, ast.unparse(node))
        for function in ast.walk(module)
        if isinstance(function, _FUNCTIONS)
        for node in _of_function(function)
    ]
    return sorted(set(found))


def _of_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    fresh = _created_locals(function)
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                stored = [part for target in targets for part in _parts(target)]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
                stored = list(_parts(target))
            case ast.withitem(optional_vars=ast.expr() as target):
                stored = list(_parts(target))
            case ast.NamedExpr(target=target):
                stored = [target]
            case ast.Call(func=ast.Attribute(value=ast.Attribute() | ast.Subscript() as changed, attr=method)) if (
                method in MUTATORS
            ):
                if not _is_own(changed, fresh):
                    yield node
                continue
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[changed, *_]):
                if not (isinstance(changed, ast.Name) and changed.id in {"self", *fresh}):
                    yield node
                continue
            case _:
                continue
        for target in stored:
            if isinstance(target, ast.Attribute | ast.Subscript) and not _is_own(target, fresh):
                yield target


def _parts(target: ast.expr) -> Iterator[ast.expr]:
    """The single targets of an assignment to a tuple or list."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _parts(element)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _is_own(place: ast.expr, fresh: set[str]) -> bool:
    """Whether the place is `self.name`, `self[key]`, a part of these by subscripts, or a part of a local of its own."""
    subscripts = 0
    while isinstance(place, ast.Subscript):
        place, subscripts = place.value, subscripts + 1
    if isinstance(place, ast.Name):
        # A subscript of a bare name: a local container, or `self`, if it is one. Parameters are not followed, as arrays
        # are passed about.
        return place.id in {"self", *fresh}
    if isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name):
        return place.value.id in {"self", *fresh}
    return False


def _created_locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Locals that the function binds only to objects that it creates: displays, comprehensions, calls of a class.

    A call counts if it calls a capitalised name, a builtin container, a function of numpy, or `copy`.
    """
    created: dict[str, bool] = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [pair for target in targets for pair in _bindings(target, value)]
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value):
                pairs = [(target.id, value)]
            case ast.For(target=target) | ast.comprehension(target=target):
                pairs = [(part.id, None) for part in _parts(target) if isinstance(part, ast.Name)]
            case ast.NamedExpr(target=ast.Name() as target, value=value):
                pairs = [(target.id, value)]
            case _:
                continue
        for name, value in pairs:
            created[name] = created.get(name, True) and value is not None and _creates(value)
    return {name for name, is_created in created.items() if is_created}


def _bindings(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr | None]]:
    if isinstance(target, ast.Name):
        return [(target.id, value)]
    if isinstance(target, ast.Tuple):
        values: list[ast.expr | None] = (
            list(value.elts)
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            else [None] * len(target.elts)
        )
        return [
            (element.id, part)
            for element, part in zip(target.elts, values, strict=True)
            if isinstance(element, ast.Name)
        ]
    return []


def _creates(value: ast.expr) -> bool:
    if isinstance(value, _FRESH):
        return True
    if not isinstance(value, ast.Call):
        return False
    match value.func:
        case ast.Name(id=name):
            return name[:1].isupper() or name in {"list", "dict", "set", "bytearray", "deque", "sorted"}
        case ast.Subscript(value=ast.Name(id=name)):
            return name in {"list", "dict", "set", "deque"}
        case ast.Attribute(value=ast.Name(id="np")) | ast.Attribute(attr="copy"):
            return True
        case ast.Attribute(value=ast.Name(), attr=name):
            return name[:1].isupper()
        case _:
            return False
