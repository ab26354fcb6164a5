"""What the expressions of a function of the core give: their types, and the state that they belong to.

A value is reached through parameters (`self` is one) or fresh: made by the function itself. A name has all values that
the function binds it to.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping

from tests.architecture.core_source import (
    ARRAY,
    CONTAINERS,
    MAPPINGS,
    NONE,
    PLAIN,
    PLAIN_NAMES,
    READ_ONLY,
    UNKNOWN,
    Def,
    Function,
    Program,
    Type,
    Value,
    merged,
    union,
)

SAME_ELEMENTS = frozenset({"list", "sorted", "reversed", "iter", "set", "deque", "tuple", "frozenset", "islice"})


class Values:
    """The values of one function's names and expressions."""

    def __init__(self, program: Program, of: Def) -> None:
        self._program, self._of, self._module = program, of, of.module
        self.used: set[Def] = set()
        """The functions with summaries that were read."""
        self._env: dict[str, list[Value]] = {}
        self._known: dict[int, Value] | None = None
        for argument in of.parameters:
            is_own = argument.arg == of.first and of.owner is not None
            kind = Type(of.owner.key, tuple(map(_variable, of.owner.parameters))) if is_own and of.owner else (
                program.annotated(self._module, argument.annotation)
            )  # fmt: skip
            self._env[argument.arg] = [Value(kind, frozenset({argument.arg}))]
        for _ in range(2):
            for node in of.binds:
                self._bind_node(node)
        self._known = {}

    def returned(self) -> Value:
        """What the function returns: its annotation's type, and whether that is fresh."""
        values = [
            self.value(node.value)
            for node in _own_nodes(self._of.node)
            if isinstance(node, ast.Return | ast.Yield) and node.value is not None
        ]
        found = merged(values or [Value(NONE, is_fresh=True)])
        given = {name: _variable(name) for name in self._of.owner.parameters} if self._of.owner else {}
        kind = self._program.annotated(self._module, self._of.node.returns, given)
        return Value(found.type if kind is UNKNOWN else kind, found.roots, found.is_fresh, found.owner)

    # Names -----------------------------------------------------------------------------------------------------------

    def _bind_node(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                kind = self._program.annotated(self._module, annotation)
                given = self.value(value) if value else Value(NONE, is_fresh=True)
                self._add(name, Value(kind, given.roots, given.is_fresh, given.owner))
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source):
                self._unpack(target, self._element(self.value(source)))
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._unpack(target, self.value(value))
            case ast.Match(subject=subject, cases=cases):
                self._match(subject, cases)
            case ast.FunctionDef() | ast.Lambda() if node is not self._of.node:
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    kind = self._program.annotated(self._module, argument.annotation)
                    # What it is called with is not known: something that exists.
                    self._add(argument.arg, Value(kind, frozenset({"*"})))
            case _:
                pass

    def _match(self, subject: ast.expr, cases: list[ast.match_case]) -> None:
        for case in cases:
            for node in ast.walk(case.pattern):
                if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                    self._add(node.name, self.value(subject).part(UNKNOWN))

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._bind(one, other)
        else:
            self._unpack(target, self.value(value))

    def _unpack(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self._add(name, value)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                kinds = [part for part in value.type.each if part.name == "tuple"]
                for idx, one in enumerate(targets):
                    kind = union(part.arg(min(idx, len(part.args) - 1)) for part in kinds) if kinds else UNKNOWN
                    kind = value.type.element if not kinds and value.type.name != "?" else kind
                    self._unpack(one, value.part(kind, value.owner))
            case ast.Starred(value=one):
                self._unpack(one, Value(Type("list", (value.type.element,)), value.roots, is_fresh=True))
            case _:
                pass

    def _add(self, name: str, value: Value) -> None:
        known = self._env.setdefault(name, [])
        if value not in known:
            known.append(value)

    # Values ----------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Value:
        """Returns what an expression gives."""
        if self._known is None:
            return self._value(node)
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = self._value(node)
        return found

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=base, attr=name):
                return self._attribute(self.value(base), name, base)
            case ast.Subscript(value=base, slice=index):
                return self._subscript(node, self.value(base), index)
            case ast.Call():
                return self._call(node)
            case ast.IfExp(body=one, orelse=other):
                return merged([self.value(one), self.value(other)])
            case ast.BoolOp(values=values):
                return merged(map(self.value, values))
            case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.value(value)
            case ast.Tuple(elts=elements):
                values = [self.value(one) for one in elements]
                found = merged(values) if values else Value(NONE)
                kinds = tuple(value.type for value in values)
                return Value(Type("tuple", kinds), found.roots, is_fresh=True)
            case ast.List(elts=elements) | ast.Set(elts=elements):
                values = [
                    self._element(self.value(one)) if isinstance(one, ast.Starred) else self.value(one)
                    for one in elements
                ]
                return self._fresh("list" if isinstance(node, ast.List) else "set", values)
            case ast.ListComp(elt=one) | ast.SetComp(elt=one) | ast.GeneratorExp(elt=one):
                return self._fresh("set" if isinstance(node, ast.SetComp) else "list", [self.value(one)])
            case ast.Dict(keys=keys, values=contents):
                mine = [self.value(one) for one in keys if one is not None]
                return self._fresh("dict", mine, [self.value(one) for one in contents])
            case ast.DictComp(key=one, value=other):
                return self._fresh("dict", [self.value(one)], [self.value(other)])
            case ast.BinOp(left=left, right=right):
                values = [self.value(left), self.value(right)]
                kinds = [each for value in values for each in value.type.each if each.name not in PLAIN_NAMES]
                roots = frozenset[str]().union(*(value.roots for value in values))
                return Value(union(kinds) if kinds else PLAIN, roots, is_fresh=True)
            case _:
                return Value(PLAIN, is_fresh=True)

    def _fresh(self, kind: str, *contents: list[Value]) -> Value:
        parts = [merged(values) if values else Value(UNKNOWN) for values in contents]
        roots = frozenset[str]().union(*(part.roots for part in parts))
        return Value(Type(kind, tuple(part.type for part in parts)), roots, is_fresh=True)

    def _name(self, name: str) -> Value:
        if name in self._env:
            return merged(self._env[name])
        found = self._module.names.get(name)
        if found is not None and found.name == "constant":
            annotation = found.of
            assert isinstance(annotation, ast.expr)
            return Value(self._program.annotated(self._module, annotation), frozenset({"*"}), owner=f":{name}")
        if found is not None and found.name != "alias":
            return Value(found, is_fresh=True)
        if name in self._module.aliases:
            constant = self._module.aliases[name]
            kind = self.value(constant).type if not isinstance(constant, ast.Name) else UNKNOWN
            return Value(kind, frozenset({"*"}), owner=f":{name}")
        return Value(Type("function", of=name), is_fresh=True)

    def _attribute(self, base: Value, name: str, node: ast.expr) -> Value:
        if isinstance(node, ast.Name) and node.id in ("np", "heapq", "itertools", "dict"):
            return Value(Type("function", of=f"{node.id}.{name}"), is_fresh=True)
        found = [one for kind in base.type.each if (one := self._member(base, kind, name)) is not None]
        return merged(found) if found else base.part(UNKNOWN)

    def _member(self, base: Value, kind: Type, name: str) -> Value | None:
        program = self._program
        if kind.name == "module":
            module = program.modules[str(kind.of)]
            found = module.names.get(name)
            return None if found is None else Value(found, is_fresh=True)
        if kind.name == "type":
            method = program.method(Type(str(kind.of)), name)
            return Value(PLAIN if method is None else Type("function", of=method), is_fresh=True)
        if kind.name in program.classes:
            if methods := program.methods(kind, name):
                return merged(self._method(base, of, method) for of, method in methods)
            for of in program.lineage(kind):
                if of.name in CONTAINERS:
                    return Value(Type("bound", (of,), of=name), base.roots, base.is_fresh, f"{kind.name}.[]")
                if (field := self._field(of, name)) is not None:
                    return base.part(field[0], field[1] or f"{of.name}.{name}")
            return None
        if kind.name in CONTAINERS | READ_ONLY | {"tuple"}:
            return Value(Type("bound", (kind,), of=name), base.roots, base.is_fresh, base.owner)
        return base.part(PLAIN) if kind.name in PLAIN_NAMES else None

    def _method(self, base: Value, kind: Type, method: Def) -> Value:
        """A bound method of `base` as a `kind`; of a property, what it gives."""
        if method.decorators & {"property", "functools.cached_property"}:
            return self._result(method, base, kind, [base])
        return Value(Type("bound", (kind,), of=method), base.roots, base.is_fresh, base.owner)

    def _field(self, kind: Type, name: str) -> tuple[Type, str] | None:
        """Returns the type of an attribute, None if the class has no such attribute; and what has it before, if any."""
        program = self._program
        found = program.classes[kind.name]
        given = dict(zip(found.parameters, kind.args, strict=False))
        if name in found.annotations:
            return program.annotated(found.module, found.annotations[name], given), ""
        if name not in found.assigned:
            return None
        key = found.key, name
        if key not in program.read_fields:
            # What was found before is the answer for itself.
            program.read_fields.add(key)
            method, value = found.assigned[name]
            body = Values(program, method)
            given = body.value(value)
            program.fields[key] = given.type, "" if given.is_fresh else given.owner, body.used
        kind, owner, functions = program.fields.get(key, (UNKNOWN, "", set[Def]()))
        self.used |= functions
        return kind, owner

    def _subscript(self, node: ast.Subscript, base: Value, index: ast.expr) -> Value:
        if base.type.name in ("function", "type"):
            return Value(self._program.annotated(self._module, node), is_fresh=True)
        found: list[Value] = []
        for kind in base.type.each:
            if isinstance(index, ast.Slice) and kind.name != "ndarray":
                found.append(Value(kind, base.roots, is_fresh=True))
            elif kind.name == "ndarray":
                found.append(base.part(ARRAY, base.owner))
            elif kind.name == "tuple" and isinstance(index, ast.Constant) and isinstance(index.value, int):
                found.append(base.part(kind.arg(index.value), base.owner))
            elif kind.name in MAPPINGS:
                found.append(base.part(kind.arg(1), base.owner))
            elif kind.name in self._program.classes:
                method, of = self._program.method(kind, "__getitem__"), self._program.container(kind)
                if method is not None:
                    found.append(self._result(method, base, kind, [base]))
                else:
                    found.append(base.part(UNKNOWN if of is kind else of.arg(1), f"{kind.name}.[]"))
            else:
                found.append(base.part(kind.element, base.owner))
        return merged(found) if found else base.part(UNKNOWN)

    def _element(self, base: Value) -> Value:
        kinds: list[Type] = []
        for kind in base.type.each:
            method = self._program.method(kind, "__iter__")
            given = self._program.container(kind)
            if method is not None:
                given = self._program.annotated(method.module, method.node.returns)
            kinds.append(given.element)
        return base.part(union(kinds) if kinds else UNKNOWN, base.owner)

    # Calls -----------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Value:
        called = self.value(node.func)
        arguments = [self.value(one) for one in node.args]
        found = [self._called(kind, called, arguments, node) for kind in called.type.each]
        return merged(found) if found else Value(UNKNOWN, _roots([called, *arguments]))

    def _keywords(self, node: ast.Call) -> dict[str, Value]:
        return {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}

    def _called(self, kind: Type, called: Value, arguments: list[Value], node: ast.Call) -> Value:
        roots = _roots([called, *arguments, *self._keywords(node).values()])
        if kind.name == "type":
            return Value(Type(str(kind.of)), roots, is_fresh=True)
        if kind.name == "callable":
            return Value(kind.of if isinstance(kind.of, Type) else UNKNOWN, roots, is_fresh=True)
        if isinstance(kind.of, Def):
            owner = [receiver(called, kind)] if kind.name == "bound" else []
            return self._result(kind.of, called, kind.arg(0), [*owner, *arguments], self._keywords(node))
        if kind.name == "bound":
            return self._of_container(called, kind.arg(0), str(kind.of), arguments, roots)
        if kind.name in self._program.classes or kind.name in CONTAINERS:
            # A class with type arguments, or `list[int]`; an object that can be called otherwise.
            is_class = isinstance(node.func, ast.Subscript)
            method = self._program.method(kind, "__call__")
            if not is_class and method is not None:
                return self._result(method, called, kind, [called, *arguments])
            return Value(kind, roots, is_fresh=True)
        return self._builtin(str(kind.of), arguments, roots, node)

    def _result(
        self, of: Def, called: Value, kind: Type, arguments: list[Value], keywords: Mapping[str, Value] | None = None
    ) -> Value:
        """What a function of the core returns."""
        self.used.add(of)
        names = of.owner.parameters if of.owner else ()
        returned = _substituted(of.returned.type, dict(zip(names, kind.args, strict=False)))
        given = dict(zip([one.arg for one in of.parameters], arguments, strict=False)) | dict(keywords or {})
        roots = frozenset[str]().union(*(given[root].roots if root in given else {"*"} for root in of.returned.roots))
        is_fresh = of.returned.is_fresh or (of.returned.roots == {of.first} and called.is_fresh and not called.roots)
        return Value(returned, roots, is_fresh, of.returned.owner)

    def _of_container(
        self, base: Value, kind: Type, method: str, arguments: list[Value], roots: frozenset[str]
    ) -> Value:
        if kind.name == "ndarray":
            is_view = method in ("reshape", "view", "T")
            return Value(ARRAY, base.roots, is_fresh=not is_view, owner=base.owner if is_view else "")
        if kind.name in MAPPINGS and method in ("get", "pop", "setdefault"):
            return base.part(union([kind.arg(1), NONE]), base.owner)
        if kind.name in MAPPINGS and method in ("values", "items", "keys"):
            inner = kind.arg(1) if method == "values" else kind.arg(0) if method == "keys" else Type("tuple", kind.args)
            return base.part(Type("Iterable", (inner,)), base.owner)
        if method == "copy":
            return Value(kind, roots, is_fresh=True)
        if method in ("pop", "popleft", "popitem"):
            inner = Type("tuple", kind.args) if method == "popitem" else kind.element
            return base.part(inner, base.owner)
        return Value(PLAIN, roots, is_fresh=True)

    def _builtin(self, name: str, arguments: list[Value], roots: frozenset[str], node: ast.Call) -> Value:
        first = arguments[0] if arguments else Value(UNKNOWN, is_fresh=True)
        short = name.rpartition(".")[2]
        if name.startswith("np."):
            return Value(ARRAY, roots, is_fresh=True)
        if short in ("min", "max", "next", "heappop"):
            positional = arguments[: len(node.args)]
            is_of_values = short in ("min", "max") and len(positional) > 1
            return merged(positional if is_of_values else [self._element(first)])
        if short in SAME_ELEMENTS:
            kind = "list" if short in ("sorted", "reversed", "iter", "islice") else short
            args = (self._element(first).type,) if arguments else ()
            return Value(Type(kind, args), roots, is_fresh=True)
        if short in ("filter", "takewhile", "dropwhile"):
            return Value(Type("list", (arguments[1].type.element,)), roots, is_fresh=True)
        if short == "map":
            inner = merged([self._called(kind, first, arguments[1:], node) for kind in first.type.each] or [first])
            return Value(Type("list", (inner.type,)), roots, is_fresh=True)
        if short == "enumerate":
            return Value(Type("list", (Type("tuple", (PLAIN, first.type.element)),)), roots, is_fresh=True)
        if short in ("zip", "product"):
            kinds = tuple(one.type.element for one in arguments[: len(node.args)])
            return Value(Type("list", (Type("tuple", kinds),)), roots, is_fresh=True)
        if short == "merge":
            return Value(Type("list", (first.type.element.element,)), roots, is_fresh=True)
        if short == "fromkeys":
            kinds = self._element(first).type, arguments[1].type if len(arguments) > 1 else NONE
            return Value(Type("dict", kinds), roots, is_fresh=True)
        if short in ("dict", "Counter", "defaultdict", "OrderedDict"):
            return Value(Type("dict", first.type.args if arguments else ()), roots, is_fresh=True)
        if short == "replace":
            return Value(first.type, roots, is_fresh=True)
        if short in ("getattr", "vars"):
            return Value(UNKNOWN, roots)
        return Value(PLAIN, roots, is_fresh=True)


def _roots(values: Iterable[Value]) -> frozenset[str]:
    """What is reached through any of the values. Nothing is reached through a number or a text."""
    return frozenset[str]().union(
        *(value.roots for value in values if any(kind.name not in PLAIN_NAMES for kind in value.type.each))
    )


def receiver(called: Value, kind: Type) -> Value:
    """The object of a bound method."""
    return Value(kind.arg(0), called.roots, called.is_fresh, called.owner)


def _variable(name: str) -> Type:
    return Type("variable", of=name)


def _substituted(kind: Type, given: Mapping[str, Type]) -> Type:
    if kind.name == "variable":
        return given.get(str(kind.of), UNKNOWN)
    return Type(kind.name, tuple(_substituted(arg, given) for arg in kind.args), kind.of) if kind.args else kind


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of inner functions."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
