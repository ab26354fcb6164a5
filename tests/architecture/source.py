"""The source files of the three programs and of what they share, for the architecture tests."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("scheduler_svc", "gpu_worker", "client", "protos/tandem_contract")


def files(*packages: str) -> list[Path]:
    """Returns every Python file of the packages, relative to the root."""
    found = [path.relative_to(ROOT) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert found, f"no Python file in {packages}"
    return found


def module_name(path: Path) -> str:
    """Returns the dotted name that imports the file."""
    parts = path.with_suffix("").parts
    if parts[0] in ("client", "protos"):
        # These folders belong to the distribution; the imported package is inside.
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parsed(source: str) -> ast.Module:
    """Returns the tree of a module's text; nobody changes it."""
    return ast.parse(source)


@functools.cache
def tree(path: Path) -> ast.Module:
    """Returns the parsed file."""
    return parsed((ROOT / path).read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Returns every node of the parsed file, as `ast.walk` yields them."""
    return tuple(ast.walk(tree(path)))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns the dotted names that a file imports, at any level."""
    found = list[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append("." * node.level + (node.module or ""))
    return tuple(found)


def places(kinds: type[ast.AST] | tuple[type[ast.AST], ...], *packages: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields each node of the kinds, after its file and the outermost class or function that it is in."""
    for path in files(*packages):
        for outer in tree(path).body:
            place = f"{path} {getattr(outer, 'name', '')}"
            yield from ((place, node) for node in ast.walk(outer) if isinstance(node, kinds))
