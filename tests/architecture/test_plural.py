"""What is counted is named in the singular, and the client makes no plural by hand."""

import ast
import re

from tests.architecture.source import PROGRAMS, files, tree


def test_numbers_are_given_their_nouns_in_one_place() -> None:
    """By `counted` and `numbered`, and not by an "s" behind a condition, as in {'s' if n > 1 else ''}."""
    found = 0
    for path in files(*PROGRAMS):
        is_client = path.parts[0] == "client"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (
                "counted", "numbered",
            ):  # fmt: skip
                if isinstance(node.args[1], ast.Constant):
                    found += 1
                    assert re.search(r"[^s]$|ss$", str(node.args[1].value)), f"{path}:{node.lineno}"
            elif is_client and isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp):
                ends = {each.value for each in (node.value.body, node.value.orelse) if isinstance(each, ast.Constant)}
                # The chart's axis has no number.
                assert "s" not in ends or path.name == "chart.py", f"{path}:{node.lineno}"
    assert found > 50
