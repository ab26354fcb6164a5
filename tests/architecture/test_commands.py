"""Processes that the programs start import nothing from the working directory."""

import ast
from collections.abc import Sequence
from pathlib import Path

from tests.architecture.source import PROGRAMS, files, tree


def commands(path: Path) -> Sequence[str]:
    """The lists of words in a file that run a module, as text."""
    lists = [node.elts for node in ast.walk(tree(path)) if isinstance(node, ast.List | ast.Tuple)]
    words = [[each.value if isinstance(each, ast.Constant) else None for each in elements] for elements in lists]
    return [str(found) for found in words if "-m" in found]


def test_every_command_of_a_module_has_the_flag() -> None:
    found = {f"{path}: {command}" for path in files(*PROGRAMS) for command in commands(path)}
    # Elsewhere commands are made by the first of them.
    assert {Path(each.partition(":")[0]).name for each in found} == {"child.py", "fork_server.py", "local.py"}
    assert [each for each in sorted(found) if "'-P', '-m'" not in each] == []
