"""What the modules of service and client load in fresh interpreters: never torch, though it is installed."""

import functools
import importlib.util
import json
import subprocess
import sys

from tests.architecture.source import ROOT, files, module_name
from tests.rigs.processes import child_environment

EXTRA = {"pydantic", "starlette", "uvicorn"}
WATCHED = {"torch", "transformers", "zmq", "grpc", "asyncio", "socket", *EXTRA}
PROBE = """
import importlib, json, sys
names, watched = json.loads(sys.stdin.read())
found = {}
for name in names:
    importlib.import_module(name)
    found[name] = [module for module in watched if module in sys.modules]
print(json.dumps(found))
"""


@functools.cache
def loaded(*packages: str) -> dict[str, set[str]]:
    """What of WATCHED is loaded after the import of each module, first those of the first package."""
    names = dict.fromkeys(module_name(path) for package in packages for path in files(package))
    # What may load more than the others.
    ordered = sorted(names, key=lambda name: name.startswith("tandem_client.gateway"))
    process = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps([ordered, sorted(WATCHED)]), capture_output=True, text=True,
        cwd=ROOT, env=child_environment(), check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return {name: set(modules) for name, modules in json.loads(process.stdout).items()}


def test_no_module_loads_torch_or_transformers() -> None:
    assert importlib.util.find_spec("torch") is not None, "this test needs an installed torch"
    found = loaded("scheduler_svc/core", "scheduler_svc") | loaded("client")
    assert {name for name, modules in found.items() if modules & {"torch", "transformers"}} == set()


def test_the_core_loads_no_sockets() -> None:
    found = loaded("scheduler_svc/core", "scheduler_svc")
    core = [modules for name, modules in found.items() if name.startswith("scheduler_svc.core")]
    assert len(core) > 20
    assert set().union(*core) & {"zmq", "grpc", "asyncio", "socket"} == set()
    assert found["scheduler_svc.frontend.server"] >= {"zmq", "grpc", "asyncio", "socket"}


def test_only_the_gateway_loads_what_its_extra_brings() -> None:
    found = loaded("client")
    others = [name for name in found if not name.startswith("tandem_client.gateway")]
    assert len(others) > 20
    assert [name for name in others if found[name] & EXTRA] == []
    assert found["tandem_client.gateway.app"] >= EXTRA - {"uvicorn"}
