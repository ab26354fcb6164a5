"""Lists what a user can name: commands, flags, RPCs, fields, settings, variables, metrics, names of the client.

One sorted line each, from the objects and programs of the checkout that is the working directory and has `.stubs`, so
that `diff` of `make inventory` at two commits shows what went.
"""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = {"scheduler_svc": "scheduler_svc", "gpu_worker": "gpu_worker", "tandem_client": "client/tandem_client"}
PATHS = [str(Path(folder).resolve()) for folder in (".stubs", "protos", "client", ".")]
SETTINGS = {
    "TANDEM_SCHEDULER_": ("scheduler_svc.settings", "SchedulerSettings"),
    "TANDEM_WORKER_": ("gpu_worker.settings", "WorkerSettings"),
    "TANDEM_GATEWAY_": ("tandem_client.gateway.settings", "Settings"),
}
MODES = {"scheduler_svc.simulator": [["--memory", "all"]]}
VARIABLE = r"(?:TANDEM|XDG)_[A-Z_]*[A-Z]|GRPC_VERBOSITY|OMP_NUM_THREADS|CXX|RAY_ADDRESS|TORCHINDUCTOR_CACHE_DIR"


def commands(command: Any, name: str) -> Iterator[str]:
    """A command of the client with its flags, arguments and variables, and its subcommands."""
    yield f"command {name}"
    for each in command.params:
        is_flag = each.param_type_name == "option"
        yield from (f"flag {name} {flag}" for flag in ([*each.opts, *each.secondary_opts] if is_flag else [each.name]))
        yield from (f"variable {variable}" for variable in [each.envvar] if variable)
    for child in getattr(command, "commands", {}).values():
        yield from commands(child, f"{name} {child.name}")


def programs() -> Iterator[str]:
    """The programs, and what --help lists, in each mode. The client's command is read from its objects instead."""
    for package, folder in PACKAGES.items():
        for path in Path(folder).rglob("*.py"):
            if '\nif __name__ == "__main__":' not in path.read_text():
                continue
            parts = path.with_suffix("").relative_to(folder).parts
            module = ".".join([package, *(part for part in parts if part != "__main__")])
            yield f"program {module}"
            for mode in [[], *MODES.get(module, [])] if module != "tandem_client.cli" else ():
                yield from helped([module, *mode])


def helped(program: list[str]) -> Iterator[str]:
    """The flags and commands that --help lists, if there is one."""
    arguments = [sys.executable, "-P", "-m", *program, "--help"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "COLUMNS": "200", "NO_COLOR": "1"}
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode == 0:
        for flag in re.findall(r"^[\s│]*(?:-\w,? )?(--[a-z][\w-]*)", ended.stdout, re.MULTILINE):
            yield f"flag {' '.join(program)} {flag}"
        # They are listed below a placeholder of argparse, or below a line of the program's own.
        below = re.split(r"^  COMMAND\n|^commands .*:\n", ended.stdout, flags=re.MULTILINE)[1:]
        for child in re.findall(r"^  (?:  )?([a-z-]+) ", "".join(below), re.MULTILINE):
            yield f"command {' '.join(program)} {child}"
            yield from helped([*program, child])


def messages(file: Any) -> Iterator[str]:
    """The RPCs, fields and enums of one file of protos."""
    for each in (method for service in file.services_by_name.values() for method in service.methods):
        streams = f"{'stream ' * each.client_streaming}{each.input_type.name}"
        yield f"rpc {each.full_name} {streams} {'stream ' * each.server_streaming}{each.output_type.name}"
    todo, enums = [*file.message_types_by_name.values()], [*file.enum_types_by_name.values()]
    for message in todo:
        todo += message.nested_types
        enums += message.enum_types
        for field in message.fields:
            kind = (field.message_type or field.enum_type).full_name if field.type in (11, 14) else field.type
            yield f"field {field.full_name} {field.number} {kind}{' repeated' * field.is_repeated}"
    yield from (f"enum {enum.full_name}.{value.name} {value.number}" for enum in enums for value in enum.values)


def variables() -> Iterator[str]:
    """Those that the code names in full."""
    for path in (path for folder in [*PACKAGES.values(), "protos"] for path in Path(folder).rglob("*.py")):
        constants = (str(getattr(node, "value", "")) for node in ast.walk(ast.parse(path.read_text())))
        yield from (f"variable {value}" for value in constants if re.fullmatch(VARIABLE, value))


def public_names(module: Any) -> Iterator[str]:
    """The client's classes, with their members and the parameters of each."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__.startswith("tandem_client") and not name.startswith("_"):
            yield f"name {module.__name__}.{name}"
            annotated = {each for kind in value.__mro__ for each in getattr(kind, "__annotations__", {})}
            for member in filter(re.compile("[^_]").match, annotated.union(dir(value)).difference(dir(Exception))):
                found = inspect.getattr_static(value, member, None)
                parameters = " ".join(inspect.signature(found).parameters) if inspect.isfunction(found) else ""
                yield f"name {module.__name__}.{name}.{member} {parameters}".rstrip()


def lines() -> Iterator[str]:
    command = import_module("typer.main").get_command(import_module("tandem_client.cli.__main__").app)
    yield from (*commands(command, "tandem"), *programs(), *variables())
    for path in Path("protos").glob("tandem/*/**/*.proto"):
        yield from messages(import_module(f"{'.'.join(path.with_suffix('').parts[1:])}_pb2").DESCRIPTOR)
    for prefix, (module, model) in SETTINGS.items():
        found = getattr(import_module(module), model)
        fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
        for name, field in getattr(found, "model_fields", {each.name: each for each in fields}).items():
            default = repr(field.default).replace(f"{Path.cwd()}/", "")
            yield from (f"setting {prefix} {name} {default}", f"variable {prefix}{name.upper()}")
    metrics = import_module("scheduler_svc.metrics.catalogue").METRICS
    yield from (" ".join(["metric", each.name, each.kind, *each.labels]) for each in metrics)
    page = import_module("tandem_client.gateway.metrics").Meter().page()
    yield from (f"metric {each}" for each in re.findall(r"(?<=# TYPE ).*", page.decode()))
    for name in ("tandem_client", "tandem_client.errors", "tandem_client.types"):
        yield from public_names(import_module(name))


if __name__ == "__main__":
    sys.path[:0] = PATHS
    print("\n".join(sorted(set(lines()))))
