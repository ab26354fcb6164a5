"""The scheduler service and the client never import torch; a fresh interpreter proves it while torch is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, files, module_name

PROBE = """
import importlib, json, sys
names, forbidden = json.loads(sys.stdin.read())
offenders = {}
for name in names:
    importlib.import_module(name)
    loaded = [module for module in forbidden if module in sys.modules]
    if loaded:
        offenders[name] = loaded
print(json.dumps(offenders))
"""


def offenders(package: str, forbidden: list[str], *, beside: str = "none") -> dict[str, list[str]]:
    """Returns the modules of the package that load a forbidden module, each with the modules it loads.

    `beside`: the part of the package that may.
    """
    names = [name for name in map(module_name, files(package)) if not name.startswith(beside)]
    process = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps([names, forbidden]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("", "client", "protos", ".stubs")),
        },
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("package", ["scheduler_svc", "client"])
def test_no_module_loads_torch_or_transformers(package: str) -> None:
    assert importlib.util.find_spec("torch") is not None, "this test needs an installed torch"
    assert offenders(package, ["torch", "transformers"]) == {}


def test_only_the_gateway_loads_what_its_extra_brings() -> None:
    extra = ["pydantic", "starlette", "uvicorn"]
    assert offenders("client", extra, beside="tandem_client.gateway") == {}
    assert "tandem_client.gateway.app" in offenders("client", extra)


def test_the_probe_detects_a_loaded_module() -> None:
    assert "tandem_client.sync_client" in offenders("client", ["grpc"])


def test_the_core_loads_no_sockets() -> None:
    assert offenders("scheduler_svc/core", ["zmq", "grpc", "asyncio", "socket"]) == {}
