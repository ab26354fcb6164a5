"""The classes, functions and types of the core as its source declares them, for `effects`.

Owns the types of annotations. Reads imports, class bodies and what methods store into `self`; runs nothing.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.architecture.source import module_name

CONTAINERS = frozenset({"list", "dict", "set", "deque", "bytearray", "ndarray", "Counter", "OrderedDict"})
READ_ONLY = frozenset({"Sequence", "Iterable", "Iterator", "Collection", "Container", "Mapping", "Set", "frozenset"})
MAPPINGS = frozenset({"dict", "Mapping", "OrderedDict", "Counter"})
PLAIN_NAMES = frozenset(
    {"int", "str", "bytes", "float", "bool", "none", "plain", "module", "type", "function", "callable"}
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# The nodes that bind names, and those that may write without binding one.
_BINDS = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension, ast.withitem, ast.Match),
    *(ast.FunctionDef, ast.Lambda),
)
_WRITES = (ast.Delete, ast.AugAssign, ast.Call, ast.Attribute)


class Type(NamedTuple):
    """`name` is a class's key (`module:Class`), a container, a plain type, `union`, or `?` if it is not known."""

    name: str
    args: tuple["Type", ...] = ()
    of: object = None
    """What a module, type, function, bound method or callable is of."""

    @property
    def each(self) -> tuple["Type", ...]:
        """The alternatives without None."""
        if self.name == "union":
            return tuple(part for arg in self.args for part in arg.each)
        return () if self.name == "none" else (self,)

    def arg(self, idx: int) -> "Type":
        return self.args[idx] if idx < len(self.args) else UNKNOWN

    @property
    def element(self) -> "Type":
        """What iteration gives."""
        return union(
            part.args if part.name == "tuple" else (PLAIN if part.name == "ndarray" else part.arg(0),)
            for part in self.each
        )


UNKNOWN, PLAIN, ARRAY, NONE = Type("?"), Type("plain"), Type("ndarray"), Type("none")


def union(types: Iterable[Iterable[Type]] | Iterable[Type]) -> Type:
    flat = [part for one in types for kind in ([one] if isinstance(one, Type) else one) for part in kind.each]
    found = tuple(dict.fromkeys(flat))
    return found[0] if len(found) == 1 else Type("union", found) if found else NONE


class Value(NamedTuple):
    """What an expression gives: its type, the parameters that it is reached through, whether it is fresh itself."""

    type: Type
    roots: frozenset[str] = frozenset()
    is_fresh: bool = False
    owner: str = ""
    """The class and attribute that a container is stored in, `module:Class.attribute`, unless it is fresh."""

    def part(self, kind: Type, owner: str = "") -> "Value":
        """Something that is reached through this value."""
        return Value(kind, self.roots, is_fresh=self.is_fresh and not self.roots, owner=owner)


NOTHING = Value(NONE, is_fresh=True)


def merged(values: Iterable[Value]) -> Value:
    values = list(values)
    owners = [value.owner for value in values if value.owner]
    return Value(
        union(value.type for value in values),
        frozenset[str]().union(*(value.roots for value in values)),
        is_fresh=all(value.is_fresh or value.type is NONE for value in values),
        owner=owners[0] if owners else "",
    )


@dataclass(eq=False)
class Class:
    key: str
    module: "Module"
    node: ast.ClassDef
    parameters: tuple[str, ...] = ()
    annotations: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])
    assigned: dict[str, tuple["Def", ast.expr]] = field(default_factory=dict[str, tuple["Def", ast.expr]])
    methods: dict[str, "Def"] = field(default_factory=dict[str, "Def"])

    @property
    def name(self) -> str:
        return self.key.partition(":")[2]

    @functools.cached_property
    def is_frozen(self) -> bool:
        return any("frozen=True" in ast.unparse(each) for each in self.node.decorator_list)


@dataclass(eq=False)
class Def:
    """A function or method, and what is known of it so far."""

    module: "Module"
    node: Function
    owner: Class | None
    writes: set[str] = field(default_factory=set[str])
    """The parameters that it writes."""
    returned: Value = NOTHING
    unfollowed: set[str] = field(default_factory=set[str])
    """What it calls without naming it: functions that it was given, and methods of protocols."""
    nodes: list[ast.AST] = field(default_factory=list[ast.AST])
    """Those that bind names or may write."""
    binds: list[ast.AST] = field(default_factory=list[ast.AST])

    def __post_init__(self) -> None:
        self.nodes = [node for node in ast.walk(self.node) if isinstance(node, (*_BINDS, *_WRITES))]
        self.binds = [node for node in self.nodes if isinstance(node, _BINDS)]

    @property
    def name(self) -> str:
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    @functools.cached_property
    def decorators(self) -> set[str]:
        return {ast.unparse(each) for each in self.node.decorator_list}

    @functools.cached_property
    def parameters(self) -> list[ast.arg]:
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]

    @functools.cached_property
    def first(self) -> str:
        """The name of a method's object, empty for other functions."""
        is_method = self.owner is not None and "staticmethod" not in self.decorators
        return self.parameters[0].arg if is_method else ""


@dataclass(slots=True, eq=False)
class Module:
    path: Path
    tree: ast.Module
    names: dict[str, Type] = field(default_factory=dict[str, Type])
    aliases: dict[str, ast.expr] = field(default_factory=dict[str, ast.expr])

    @property
    def name(self) -> str:
        return module_name(self.path)

    @property
    def room(self) -> str:
        """The first folder or module under the core."""
        return self.path.parts[2].removesuffix(".py")


class Program:
    """All modules of the core."""

    def __init__(self, trees: Mapping[Path, ast.Module]) -> None:
        self.modules = {module_name(path): Module(path, tree) for path, tree in trees.items()}
        self.classes: dict[str, Class] = {}
        self.defs: list[Def] = []
        for module in self.modules.values():
            self._declare(module)
        for module in self.modules.values():
            self._import(module)
        self.fields: dict[tuple[str, str], tuple[Type, str, set[Def]]] = {}
        """What is known of attributes without an annotation, by class and name: the type, the class and attribute that
        had the object before, and the functions that these depend on."""
        self.read_fields: set[tuple[str, str]] = set()
        """Those that need not be read again."""
        # What does not change from reading to reading.
        self.lineage = functools.cache(self._lineage)
        self.methods = functools.cache(self._methods)
        self._plainly_annotated = functools.cache(functools.partial(self._annotated, given={}))

    def _declare(self, module: Module) -> None:
        for node in module.tree.body:
            match node:
                case ast.ClassDef(name=name):
                    found = self._class(module, node)
                    module.names[name] = Type("type", of=found.key)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    module.names[name] = Type("function", of=self._def(module, node, None))
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    module.aliases[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    module.names[name] = Type("constant", of=annotation)
                case _:
                    pass

    def _def(self, module: Module, node: Function, owner: Class | None) -> Def:
        found = Def(module, node, owner)
        self.defs.append(found)
        return found

    def _class(self, module: Module, node: ast.ClassDef) -> Class:
        found = self.classes[f"{module.name}:{node.name}"] = Class(f"{module.name}:{node.name}", module, node)
        for base in node.bases:
            if isinstance(base, ast.Subscript) and ast.unparse(base.value) in ("Generic", "Protocol"):
                found.parameters = tuple(ast.unparse(base.slice).strip("()").split(", "))
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                found.annotations[item.target.id] = item.annotation
            elif isinstance(item, Function):
                method = found.methods[item.name] = self._def(module, item, found)
                for inner in ast.walk(item):
                    self._attributes(found, method, inner)
        return found

    def _attributes(self, found: Class, method: Def, node: ast.AST) -> None:
        def add(target: ast.expr, value: ast.expr) -> None:
            match target, value:
                case ast.Attribute(value=ast.Name(id="self"), attr=name), _:
                    if name not in found.assigned or method.node.name == "__init__":
                        found.assigned.setdefault(name, (method, value))
                case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
                    for one, other in zip(targets, values, strict=True):
                        add(one, other)
                case _:
                    pass

        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    add(target, value)
            case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=annotation):
                found.annotations.setdefault(name, annotation)
            case _:
                pass

    def _import(self, module: Module) -> None:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for alias in node.names:
                name, source = alias.asname or alias.name, self.modules.get(node.module)
                inner = f"{node.module}.{alias.name}"
                if inner in self.modules:
                    module.names[name] = Type("module", of=inner)
                elif source is not None and alias.name in source.names:
                    module.names[name] = source.names[alias.name]
                elif source is not None and alias.name in source.aliases:
                    module.names[name] = Type("alias", of=(source, source.aliases[alias.name]))

    def _lineage(self, kind: Type) -> tuple[Type, ...]:
        """A class of the core and all that it inherits from, which may end in a container. Others have none."""
        return tuple(self._ancestors(kind))

    def _ancestors(self, kind: Type) -> Iterator[Type]:
        if (found := self.classes.get(kind.name)) is None:
            return
        yield kind
        given = dict(zip(found.parameters, kind.args, strict=False))
        for base in found.node.bases:
            inherited = self.annotated(found.module, base, given)
            yield from self.lineage(inherited)
            if inherited.name in CONTAINERS:
                yield inherited

    def _methods(self, kind: Type, name: str) -> list[tuple[Type, Def]]:
        """Returns what a call of a method may run: the inherited one, and those of subclasses. With their classes."""
        of = [(one, self.classes[one.name].methods) for one in self.lineage(kind) if one.name in self.classes]
        found = [(one, methods[name]) for one, methods in of if name in methods][:1]
        if found and not name.startswith("__"):
            below = [Type(key) for key in self.classes if key != kind.name]
            found += [
                (one, self.classes[one.name].methods[name])
                for one in below
                if name in self.classes[one.name].methods and any(base.name == kind.name for base in self.lineage(one))
            ]
        return found

    def method(self, kind: Type, name: str) -> Def | None:
        """Returns the method that a class of the core has or inherits, or None."""
        return next((method for _, method in self.methods(kind, name)), None)

    def container(self, kind: Type) -> Type:
        """Returns the container that a class of the core inherits from; any other type itself."""
        return next((one for one in self.lineage(kind) if one.name in CONTAINERS), kind)

    # Annotations -----------------------------------------------------------------------------------------------------

    def annotated(self, module: Module, node: ast.expr | None, given: Mapping[str, Type] | None = None) -> Type:
        """Returns the type that an annotation names. `given` has the arguments of a generic class."""
        return self._annotated(module, node, given) if given else self._plainly_annotated(module, node)

    def _annotated(self, module: Module, node: ast.expr | None, given: Mapping[str, Type]) -> Type:
        read = functools.partial(self.annotated, module, given=given)
        match node:
            case None:
                return UNKNOWN
            case ast.Constant(value=None):
                return NONE
            case ast.Constant(value=str() as text):
                return read(ast.parse(text, mode="eval").body)
            case ast.Name(id=name):
                return self._named(module, name, given)
            case ast.Attribute():
                found = self._member(module, node)
                return ARRAY if node.attr == "NDArray" else found
            case ast.BinOp(op=ast.BitOr(), left=left, right=right):
                return union([read(left), read(right)])
            case ast.Call(func=ast.Name(id="TypeVar"), keywords=[ast.keyword(arg="bound", value=bound)]):
                return read(bound)
            case ast.Subscript(value=base, slice=index):
                items = index.elts if isinstance(index, ast.Tuple) else [index]
                if (name := ast.unparse(base).rpartition(".")[2]) in ("NDArray", "ndarray"):
                    return ARRAY
                if name == "Callable":
                    return Type("callable", of=read(items[-1]))
                if name == "Annotated":
                    return read(items[0])
                if name in ("type", "Literal", "Generic", "Protocol"):
                    return PLAIN
                args = tuple(read(item) for item in items if not _is_ellipsis(item))
                kind = read(base)
                return Type(kind.name if kind.name != "?" else name, args, kind.of)
            case _:
                return UNKNOWN

    def _named(self, module: Module, name: str, given: Mapping[str, Type]) -> Type:
        if name in given:
            return given[name]
        if name in module.aliases:
            return self.annotated(module, module.aliases[name])
        found = module.names.get(name)
        if found is not None and found.name == "type":
            return Type(str(found.of))
        if found is not None and found.name == "alias":
            return self.annotated(*found.of)  # pyright: ignore
        if name in CONTAINERS or name in READ_ONLY or name == "tuple":
            return Type(name)
        return PLAIN if name in {"int", "str", "bytes", "float", "bool", "object", "Any", "StrEnum"} else UNKNOWN

    def _member(self, module: Module, node: ast.Attribute) -> Type:
        outer = module.names.get(ast.unparse(node.value))
        if outer is None or outer.name != "module":
            return PLAIN if ast.unparse(node.value) == "np" else UNKNOWN
        return self._named(self.modules[str(outer.of)], node.attr, {})


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...
