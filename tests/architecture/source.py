"""The source files of the three programs, as the architecture tests read them."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("scheduler_svc", "gpu_worker", "client")


def files(*packages: str) -> list[Path]:
    """Every Python file of the packages, relative to the root."""
    found = [path.relative_to(ROOT) for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    assert found, f"no Python file in {packages}"
    return found


def module_name(path: Path) -> str:
    """The dotted name that imports the file."""
    parts = path.with_suffix("").parts
    if parts[0] == "client":
        # The folder of the distribution; what is imported is the package in it.
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    """The file, parsed."""
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield "." * child.level + (child.module or "")
