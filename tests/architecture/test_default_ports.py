"""The ports at which programs listen unless told otherwise: no test may need one of them."""

import ast
import re

from tests.architecture import source
from tests.rigs.default_ports import DEFAULT_PORTS


def test_the_tests_hold_every_default_port() -> None:
    """A port that a program names as an address of its own code is one at which a test might start it."""
    address = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1?\]|0\.0\.0\.0)?:(\d+)")
    texts = [
        node.value
        for path in source.files(*source.PROGRAMS)
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    ports = {int(found[1]) for text in texts if (found := address.fullmatch(text.removeprefix("tcp://")))}
    assert ports - {0} == set(DEFAULT_PORTS)
