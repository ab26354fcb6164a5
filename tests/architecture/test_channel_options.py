"""The names of gRPC's options: gRPC ignores a name that it does not know, and says nothing."""

import ast
import functools
import re
from pathlib import Path

from grpc._cython import cygrpc

from tests.architecture.source import PROGRAMS, ROOT, files, nodes

# A name in the library's binary is a string of C, which a zero byte ends.
_NAME = re.compile(rb"(grpc\.[a-z][a-z0-9_.]+)\x00")
# The services of gRPC's own packages have names with the same beginning.
_OF_SERVICES = ("grpc.health.v1", "grpc.reflection.v1")


@functools.cache
def known_names() -> frozenset[str]:
    """The names that the installed library compares with, as its binary has them."""
    assert cygrpc.__file__ is not None
    return frozenset(name.decode() for name in _NAME.findall(Path(cygrpc.__file__).read_bytes()))


@functools.cache
def names(path: Path) -> frozenset[str]:
    """The texts of a file that begin a pair of a name and a value, or a list of such names."""
    if '"grpc.' not in (ROOT / path).read_text():
        return frozenset()
    firsts = [node.elts[0] for node in nodes(path) if isinstance(node, ast.Tuple | ast.List) and node.elts]
    texts = [str(each.value) for each in firsts if isinstance(each, ast.Constant)]
    return frozenset(text for text in texts if text.startswith("grpc.") and not text.startswith(_OF_SERVICES))


def test_every_option_has_a_name_that_grpc_knows() -> None:
    known, used = known_names(), {path: names(path) for path in files(*PROGRAMS, "tests")}
    assert len(known) > 100
    assert len(frozenset().union(*used.values())) > 20
    assert {str(path): unknown for path, found in used.items() if (unknown := found - known)} == {}


def test_no_option_hides_from_the_test_above() -> None:
    """A text with the name of an option stands where that test sees it."""
    hidden = {
        f"{path}:{node.lineno}"
        for path in files(*PROGRAMS)
        if '"grpc.' in (ROOT / path).read_text()
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in known_names() - names(path)
    }
    assert hidden == set()
