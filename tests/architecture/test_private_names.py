"""Private parts of gRPC and asyncio, and gRPC's sockets, are used in one room only, which has a switch."""

import ast
import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.architecture.source import files, nodes

ROOM = Path("scheduler_svc/frontend/grpc_tuning")
LIBRARIES = ("grpc", "asyncio")
# In strings, as names that are looked up, loggers and paths.
TEXT = re.compile(r"__pyx|grpc\._|_asyncio_|/proc/self/fd|\bcygrpc\b")
# Attributes of tasks, futures and loops; variables may have any name.
OF_ASYNCIO = {
    name
    for kind in (asyncio.Future, asyncio.Task, asyncio.SelectorEventLoop)
    for name in dir(kind)
    if name.startswith("_") and not name.startswith("__")
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def private_uses(read: Sequence[ast.AST]) -> Iterator[str]:
    """Yields what a file of these nodes uses of the libraries' private parts."""
    bound = set(LIBRARIES)
    for node in read:
        if isinstance(node, ast.Import):
            bound |= {alias.asname for alias in node.names if alias.asname and is_of_library(alias.name)}
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and is_of_library(node.module or ""):
            bound |= {alias.asname or alias.name for alias in node.names}
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if is_of_library(name) and any(map(is_private, name.split("."))))
    documents = {id(node.value) for node in read if isinstance(node, ast.Expr)}
    for node in read:
        if isinstance(node, ast.Attribute) and (is_private(node.attr) or node.attr == "get_referents"):
            whole = ast.unparse(node)
            is_bound = whole.partition(".")[0] in bound and is_private(node.attr)
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if is_bound or whole == "gc.get_referents" or (node.attr in OF_ASYNCIO and not is_own):
                yield whole
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield from TEXT.findall(node.value)


def test_private_parts_of_grpc_and_asyncio_are_used_in_one_room():
    found = {
        str(path): sorted(uses)
        for path in files("scheduler_svc", "client", "protos/tandem_contract")
        if not path.is_relative_to(ROOM) and (uses := set(private_uses(nodes(path))))
    }
    assert found == {}


def test_the_search_finds_what_the_room_has():
    own = {path.name: set(private_uses(nodes(path))) for path in files(str(ROOM))}
    assert "__pyx" in own["ends.py"] and "gc.get_referents" in own["ends.py"]
    assert "future._asyncio_future_blocking" in own["event_loop.py"]
    assert "/proc/self/fd" in own["sockets.py"] and "cygrpc" in own["ends.py"]
    source = (
        "import asyncio as a\nfrom grpc import aio\nfrom grpc._cython import cygrpc\na.tasks._all(aio._server, t._coro)"
    )
    assert set(private_uses(list(ast.walk(ast.parse(source))))) == {
        "grpc._cython.cygrpc",
        "a.tasks._all",
        "aio._server",
        "t._coro",
    }
