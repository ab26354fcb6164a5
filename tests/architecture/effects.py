"""Which state each function of the core writes, read from the source: stores, and calls of functions that write.

Follows methods: a function writes a parameter if it stores into what is reached through it, or passes it to a function
that does. Owns no rule: `test_ownership` says which code may write what, and which must not.
"""

import ast
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.core_source import CONTAINERS, PLAIN, Def, Program, Type, Value
from tests.architecture.core_values import Values, receiver

# Methods that change a list, dict, set, deque, bytearray or array in place.
MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "fill"),
        *("insert", "intersection_update", "itemset", "move_to_end", "partition", "pop", "popitem", "popleft", "put"),
        *("remove", "resize", "reverse", "setdefault", "sort", "subtract", "symmetric_difference_update", "update"),
    }
)
# Functions that change their first argument.
CHANGERS = frozenset({"heappush", "heappop", "heapify", "heapreplace", "heappushpop", "insort", "shuffle"})
SETTERS = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})


@dataclass(frozen=True, slots=True)
class Write:
    """One store, or one call of a function that writes. `attribute` is empty for a call."""

    place: Def
    line: int
    code: str
    owner: str
    """`module:Class` of the object that is changed; empty if its type is not known."""
    attribute: str
    roots: frozenset[str]

    @property
    def what(self) -> str:
        """`Class.attribute` for a store, `Class` for a call. '?' is a class that is not known."""
        name = self.owner.partition(":")[2] or "?"
        return f"{name}.{self.attribute}" if self.attribute else name

    def __str__(self) -> str:
        return f"{self.place.module.path}:{self.line}: {self.place.name} changes {self.what}: {self.code}"


class Effects(Program):
    """All modules of the core, with the writes of each function."""

    def __init__(self, trees: Mapping[Path, ast.Module], caches: Container[str] = ()) -> None:
        """`caches` are attributes (`Class.attribute`) that could be computed again: a store into one is not a write."""
        super().__init__(trees)
        self._caches = caches
        self.writers = set(MUTATORS)
        """Names of methods that write. A call of one on an object of an unknown type is a write."""
        self.writes = self._solve()

    def _solve(self) -> list[Write]:
        """Reads all functions until nothing new is known of any."""
        writes, used, changed = dict[Def, list[Write]](), dict[Def, set[Def]](), set(self.defs)
        while changed:
            read = [one for one in self.defs if one not in used or not changed.isdisjoint(used[one])]
            changed = set[Def]()
            self.read_fields.clear()
            fields = {key: known[:2] for key, known in self.fields.items()}
            self.writers |= {one.node.name for one in self.defs if one.first in one.writes}
            for one in read:
                before = frozenset(one.writes), one.returned
                writes[one], used[one] = self._read(one)
                if before != (one.writes, one.returned):
                    changed.add(one)
            if fields != {key: known[:2] for key, known in self.fields.items()}:
                changed = set(self.defs)
        return [write for found in writes.values() for write in found]

    def _read(self, one: Def) -> tuple[list[Write], set[Def]]:
        """Learns what a function writes and returns. Returns its writes, and the functions that it depends on."""
        body = _Writes(self, one)
        writes = body.writes()
        names = {argument.arg for argument in one.parameters}
        one.writes |= {root for write in writes if write.what not in self._caches for root in write.roots & names}
        if one.node.name == "__init__":
            one.writes.discard(one.first)
        one.returned = body.returned()
        return writes, body.used


class _Writes(Values):
    """What one function writes."""

    def __init__(self, program: Effects, of: Def) -> None:
        super().__init__(program, of)
        self._effects = program

    def writes(self) -> list[Write]:
        """Returns the writes of the function. What it has created itself does not count."""
        return [write for node in self._of.nodes for write in self._of_node(node)]

    def _of_node(self, node: ast.AST) -> Iterator[Write]:
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                for target in targets:
                    yield from self._store(target)
            case ast.AugAssign(target=ast.Name() as target):
                value = self.value(target)
                if any(kind.name in CONTAINERS | {"?"} for kind in value.type.each):
                    yield from self._changed(value, target)
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
                yield from self._store(target)
            case ast.withitem(optional_vars=ast.expr() as target) | ast.NamedExpr(target=target):
                yield from self._store(target)
            case ast.Call():
                yield from self._of_call(node)
            case ast.Attribute(value=base, attr=name):
                value = self.value(base)
                for kind in value.type.each:
                    for of, method in self._program.methods(kind, name):
                        if "property" in method.decorators:
                            given = Value(of, value.roots, value.is_fresh, value.owner)
                            yield from self._of_def(method, [given], node)
            case _:
                pass

    def _store(self, target: ast.expr) -> Iterator[Write]:
        match target:
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for one in targets:
                    yield from self._store(one)
            case ast.Starred(value=one):
                yield from self._store(one)
            case ast.Attribute(value=base, attr=name):
                value = self.value(base)
                if value.is_fresh:
                    return
                owners = [kind.name for kind in value.type.each if kind.name in self._program.classes]
                for owner in owners or [""]:
                    yield self._write(target, owner, name, value.roots)
            case ast.Subscript(value=base):
                yield from self._changed(self.value(base), target)
            case _:
                pass

    def _changed(self, value: Value, node: ast.AST) -> Iterator[Write]:
        """The write of a container, of the class that has it. A container of a parameter has the caller's owner."""
        if value.is_fresh:
            return
        of = [kind.name for kind in value.type.each if self._program.container(kind) is not kind]
        if of:
            yield self._write(node, of[0], "[]", value.roots)
            return
        owner, _, name = value.owner.rpartition(".") if ":" in value.owner[1:] else ("", "", value.owner)
        is_known = bool(value.type.each) and all(kind.name != "?" for kind in value.type.each)
        yield self._write(node, owner or ("parameter" if is_known and not name else ""), name, value.roots)

    def _write(self, node: ast.AST, owner: str, name: str, roots: frozenset[str]) -> Write:
        assert isinstance(node, ast.expr)
        return Write(self._of, node.lineno, ast.unparse(node), owner, name, roots)

    def _of_call(self, node: ast.Call) -> Iterator[Write]:
        called = self.value(node.func)
        arguments = [self.value(one) for one in node.args]
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in CHANGERS | SETTERS and arguments:
            is_object = name in SETTERS
            kinds = [kind.name for kind in arguments[0].type.each if kind.name in self._program.classes]
            if is_object and not arguments[0].is_fresh:
                yield self._write(node, kinds[0] if kinds else "", "*", arguments[0].roots)
            elif not is_object:
                yield from self._changed(arguments[0], node)
            return
        kinds = called.type.each
        is_unknown = isinstance(node.func, ast.Attribute) and (not kinds or any(kind.name == "?" for kind in kinds))
        if is_unknown and name in self._effects.writers and not called.is_fresh:
            yield self._write(node, "", "", called.roots)
        for kind in kinds:
            method = self._program.method(kind, "__call__")
            if kind.name == "callable" or (method is not None and not isinstance(node.func, ast.Subscript)):
                self._of.unfollowed.add(ast.unparse(node.func))
            if isinstance(kind.of, Def):
                values = [receiver(called, kind), *arguments] if kind.name == "bound" else arguments
                yield from self._of_def(kind.of, values, node, self._keywords(node))
            elif kind.name == "type" and (init := self._program.method(Type(str(kind.of)), "__init__")) is not None:
                yield from self._of_def(init, [Value(PLAIN, is_fresh=True), *arguments], node, self._keywords(node))
            elif kind.name == "bound" and kind.of in MUTATORS:
                yield from self._changed(Value(kind.arg(0), called.roots, called.is_fresh, called.owner), node)

    def _of_def(
        self, of: Def, arguments: list[Value], node: ast.expr, keywords: Mapping[str, Value] | None = None
    ) -> Iterator[Write]:
        """The writes of a call: into the object of a method, and into what other functions are given."""
        self.used.add(of)
        given = dict(zip([one.arg for one in of.parameters], arguments, strict=False)) | dict(keywords or {})
        for name in sorted(of.writes):
            value = given.get(name)
            if value is None or value.is_fresh:
                continue
            kinds = [one.name for one in value.type.each if one.name in self._program.classes]
            if not kinds:
                yield from self._changed(value, node)
                continue
            is_own = name == of.first or (not of.first and of.owner is None)
            for one in kinds:
                owner = self._program.classes[one]
                # What is reached through a frozen object belongs to others.
                is_changed = is_own and owner.module.room == of.module.room and not owner.is_frozen
                yield self._write(node, one if is_changed else "follows", "", value.roots)
