"""Every definition of the programs is used by a program, not only by its tests."""

import ast
from collections import Counter
from pathlib import Path

from tests.architecture.source import PROGRAMS, files, nodes

# Methods that a library calls by name, and those that users of the client call.
CALLED_FROM_OUTSIDE = {
    "TandemRollout",  # the rollout_func of TRL's GRPOTrainer, made by the user
    "List",  # gRPC: a method of grpc.health.v1.Health
    "capture_signals",  # uvicorn.Server
    "aclose",  # contextlib.aclosing
    "emit",  # logging.Handler
    "resolve_handler",  # gRPC, of what finds a call's handler
    "list_commands",  # click.Command
    "settings_customise_sources",  # pydantic-settings
    "startup",  # uvicorn.Server
    "wait_closed",  # uvicorn, of what accepts connections
}
# Views of state that tests check and no program needs.
FOR_TESTS = {"extents", "num_watches"}


def definitions(path: Path) -> set[str]:
    """Names of the functions, methods and classes of a module, apart from those that Python itself calls."""
    return {
        node.name
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not (node.name.startswith("__") and node.name.endswith("__"))
        # What a decorator registers (a command, an option's check, a handler of events) is called by its framework.
        and not any(isinstance(decorator, ast.Call) and _registers(decorator) for decorator in node.decorator_list)
    }


def _registers(decorator: ast.Call) -> bool:
    name = decorator.func.attr if isinstance(decorator.func, ast.Attribute) else ast.unparse(decorator.func)
    return name in {"command", "callback", "handles", "register"} or name.endswith("_validator")


def mentions(path: Path) -> Counter[str]:
    """How often each name is read, imported, looked up as an attribute or written in a string of the module."""
    found: Counter[str] = Counter()
    for node in nodes(path):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found[name] += 1
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                found.update(alias.name for alias in names)
            case ast.Constant(value=str() as text) if text.isidentifier():
                found[text] += 1
            case _:
                pass
    return found


def test_every_definition_is_used() -> None:
    used: Counter[str] = Counter()
    for path in files(*PROGRAMS):
        used += mentions(path)
    unused = {f"{path}:{name}" for path in files(*PROGRAMS) for name in definitions(path) if not used[name]}
    assert {entry for entry in unused if entry.rpartition(":")[2] not in CALLED_FROM_OUTSIDE | FOR_TESTS} == set()
