"""What is counted is named in the singular, and no program makes a plural by hand."""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tandem_contract.plural import numbered
from tests.architecture.source import PROGRAMS, files, nodes

COUNTING = ("counted", "numbered")
_NUMBER = re.compile(r"%[-+,.\d]*[ds]")


def text_of(node: ast.AST) -> str:
    """A constant text, or the begin of one that is put together."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@functools.cache
def counted_things() -> dict[str, str]:
    """The things that programs count, by place."""
    return {
        f"{path}:{call.lineno}": re.split(" (?:of|to) ", text_of(call.args[1]))[0]
        for path in files(*PROGRAMS)
        for call in nodes(path)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in COUNTING
        if text_of(call.args[1])
    }


def is_constant(node: ast.AST) -> bool:
    """Whether a value is known, as those in capitals are. Of these none is 1."""
    match node:
        case ast.Constant():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.BinOp(left=left, right=right):
            return is_constant(left) and is_constant(right)
        case _:
            return False


def never_one(value: ast.AST, rest: str, guards: list[ast.AST]) -> bool:
    """Whether a number before the rest of its text, below these conditions, cannot be 1, by the structure of the code.

    It is a constant; above a limit, which the text gives next; in a text for more than one; or part of a unit.
    """
    above_one = any(
        isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.Gt) and ast.unparse(each.comparators[0]) == "1"
        for each in guards
    )
    return is_constant(value) or above_one or re.match(r"[^;]*; the limit is |/", rest) is not None


def texts(path: Path) -> Iterator[tuple[ast.AST, ast.AST, str]]:
    """Yields each number of a text that is put together: where, its value, and what follows it."""
    for node in nodes(path):
        match node:
            case ast.JoinedStr(values=values):
                for one, after in itertools.pairwise(values):
                    if isinstance(one, ast.FormattedValue) and not is_fraction(one.format_spec):
                        yield node, one.value, text_of(after)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger")), args=[form, *arguments]):
                values = [each for one in arguments for each in (one.value.elts if is_star(one) else [one])]
                for found, value in zip(_NUMBER.finditer(text_of(form)), values, strict=False):
                    yield node, value, text_of(form)[found.end() :]
            case _:
                pass


def around(path: Path, inner: ast.AST) -> list[ast.AST]:
    """The conditional expressions and assertions of a file that this node is in."""
    return [node for node in nodes(path) if isinstance(node, ast.IfExp | ast.Assert) and inner in ast.walk(node)]


def is_fraction(form: ast.AST | None) -> bool:
    """Whether a number of this form is one, which is never a single thing."""
    return form is not None and text_of(form).endswith(("f", "g"))


def is_star(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple)


def by_hand(path: Path, plurals: re.Pattern[str]) -> Iterator[str]:
    """The lines of a file where the plural of something that programs count follows a number."""
    for node, value, rest in texts(path):
        if (found := plurals.match(rest)) is not None:
            outer = around(path, node)
            guards = [each.test for each in outer if isinstance(each, ast.IfExp)]
            # What an assertion says is a mistake of ours.
            is_ours = any(isinstance(each, ast.Assert) for each in outer)
            if not is_ours and not never_one(value, rest[found.end() :], guards):
                yield f"{path}:{node.lineno}:{found[0]}"


def test_things_are_counted_in_the_singular() -> None:
    found = counted_things()
    assert len(found) > 200
    assert {place: thing for place, thing in found.items() if not re.search(r"[^s]$|ss$", thing)} == {}


def test_no_number_is_given_a_plural_by_hand() -> None:
    """Numbers have their nouns from `counted` and `numbered`: 1 request, 2 requests."""
    things = set(counted_things().values())
    plurals = "|".join(sorted({numbered(2, thing).partition(" ")[2] for thing in things}, key=len, reverse=True))
    pattern = re.compile(rf" (?:(?!of )[a-z-]+ )?(?:{plurals})\b")
    found = [line for path in files(*PROGRAMS) for line in by_hand(path, pattern)]
    assert found == []


def test_no_letter_of_a_plural_depends_on_a_number() -> None:
    """As in {'s' if n > 1 else ''} and {'row' if n == 1 else 'rows'}."""
    found = list[str]()
    for path in files(*PROGRAMS):
        for node in nodes(path):
            if isinstance(node, ast.IfExp) and "1" in ast.unparse(node.test).split():
                ends = sorted(text_of(each) for each in (node.body, node.orelse))
                # The chart's axis has no number.
                if ends[1] and ends[0] + "s" == ends[1] and path.name != "chart.py":
                    found.append(f"{path}:{node.lineno}")
    assert found == []
