"""The shape of the product as numbers, to compare commits: `make shape`. It reports and judges nothing.

A room is a folder or a module directly in a package. An arrow is one room that imports another, however often. Fan-out
is the number of modules of the package that one module imports; branches are those of `test_sizes`.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.architecture.test_sizes import MAX_COMPLEXITY, complexity, functions

PACKAGES = (
    "scheduler_svc/core",
    "scheduler_svc/frontend",
    "scheduler_svc",
    "gpu_worker",
    "client/tandem_client",
    "protos/tandem_contract",
)


@dataclass(kw_only=True)
class Shape:
    """The numbers of one package."""

    modules: dict[str, Path]
    """By dotted name."""
    lines: int = 0
    arrows: set[tuple[str, str]] = field(default_factory=set)
    fan_out: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    branches: dict[str, int] = field(default_factory=dict)
    """Functions above the limit."""
    classes: Counter[str] = field(default_factory=Counter)

    @property
    def rooms(self) -> set[str]:
        return {self.room(name) for name in self.modules}

    @staticmethod
    def room(module: str) -> str:
        return module.partition(".")[0]


def shape_of(folder: Path, package: str) -> Shape:
    """The shape of the package of this dotted name, which is in this folder."""
    paths = {}
    for path in sorted(folder.rglob("*.py")):
        words = path.relative_to(folder).with_suffix("").parts
        paths[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    shape = Shape(modules={name: path for name, path in paths.items() if name})
    for name, path in shape.modules.items():
        text = path.read_text()
        tree = ast.parse(text)
        shape.lines += text.count("\n")
        for target in _imported(tree, f"{package}."):
            if target != name and target in shape.modules:
                shape.fan_out[name].add(target)
                if shape.room(target) != shape.room(name):
                    shape.arrows.add((shape.room(name), shape.room(target)))
        for inner, function in functions(tree):
            if (count := complexity(function)) > MAX_COMPLEXITY:
                shape.branches[f"{name}.{inner}"] = count
        shape.classes.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return shape


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """What a file imports of the package, anywhere in it: names of modules, and of what is in them."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [node.module, *found]
        yield from (name.removeprefix(package) for name in names if name.startswith(package))


def report(root: Path) -> Iterator[str]:
    """A line for each package, then what stands out."""
    yield "package                    lines modules rooms arrows fan-out branches>12 repeated classes"
    notes = []
    for package in PACKAGES:
        if not (root / package).is_dir():
            continue
        shape = shape_of(root / package, package.removeprefix("client/").removeprefix("protos/").replace("/", "."))
        repeated = [f"{name} {count}" for name, count in shape.classes.most_common() if count > 1]
        widest = max(shape.fan_out, key=lambda name: len(shape.fan_out[name]))
        yield (
            f"{package:24} {shape.lines:7,} {len(shape.modules):7} {len(shape.rooms):5} {len(shape.arrows):6}"
            f" {len(shape.fan_out[widest]):7} {len(shape.branches):11} {len(repeated):16}"
        )
        worst = sorted(shape.branches.items(), key=lambda item: -item[1])[:5]
        notes.append(f"{package}: widest {widest}; branches: " + ", ".join(f"{name} {n}" for name, n in worst))
        notes.append(f"  repeated classes: {', '.join(repeated[:12]) or 'none'}")
    yield ""
    yield from notes


if __name__ == "__main__":
    print("\n".join(report(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[2])))
