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
def tree(path: Path) -> ast.Module:
    """Returns the parsed file."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a file imports, at any level."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield "." * child.level + (child.module or "")
