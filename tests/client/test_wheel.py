"""The wheel: its files, its dependencies, and that its client works without a checkout and without torch."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.client.fake_service import FakeService

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("LICENSE", "README.md", "client", "protos", "pyproject.toml")

# A program beside the unpacked wheel: it imports every module and uses both clients.
VISIT = """
import asyncio, importlib, pkgutil, sys

BLOCKED = ("torch", "transformers", "numpy", "matplotlib", "zmq", "pydantic", "starlette", "uvicorn")
BLOCKED += ("scheduler_svc", "gpu_worker")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Blocked())
import tandem_client, tandem
for package in (tandem_client, tandem):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        # The modules of these need the extras of their names.
        if not module.name.startswith(("tandem_client.gateway.", "tandem_client.plot.")):
            importlib.import_module(module.name)

address = sys.argv[1]
with tandem_client.Client(address) as sync_client:
    print("".join(delta.text for delta in sync_client.generate("hi")))

async def read():
    async with tandem_client.AsyncClient(address) as async_client:
        return [delta.text async for delta in async_client.generate("hi")]

print("".join(asyncio.run(read())))
print(tandem_client.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds from a copy, because a build writes the stubs again, and other tests use those of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("tandem_inference-*.whl")
    return path


def test_the_wheel_holds_only_the_client_the_contract_and_the_public_stubs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
    stubs = {
        f"tandem/v1/{service}_pb2{kind}"
        for service in ("inference", "control", "chat", "constraint", "limits")
        for kind in (".py", ".pyi", "_grpc.py", "_grpc.pyi")
    }
    stubs |= {f"tandem/{name}" for name in ("__init__.py", "py.typed", "v1/__init__.py")}
    assert {name for name in names if name.startswith("tandem/")} == stubs
    own = ("tandem/", "tandem_client/", "tandem_contract/", f"{info}/")
    assert [name for name in names if not name.startswith(own)] == []
    assert {f"tandem_client/{name}" for name in ("__init__.py", "py.typed", "cli/__main__.py")} <= names
    assert {"tandem_contract/__init__.py", f"{info}/licenses/LICENSE"} <= names
    assert not [name for name in names if name.startswith("tandem_client/demo") or "__pycache__" in name]


def test_the_wheel_depends_on_the_imports_of_its_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(info).decode())
        entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    known = "googleapis-common-protos grpcio grpcio-health-checking markdown-it-py prompt-toolkit protobuf rich typer"
    assert sorted(re.split("[<>=]", need)[0] for need in needs) == known.split()
    assert "tandem = tandem_client.cli.__main__:main" in entry_points


def test_the_wheel_works_without_a_checkout_and_without_torch(
    wheel: Path, tmp_path: Path, service: FakeService
) -> None:
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    # -S: without it the editable install's .pth file would put the checkout on the path.
    visited = subprocess.run(
        [sys.executable, "-S", "-P", "-c", VISIT, service.address], capture_output=True, text=True, cwd=tmp_path,
        env={**environment, "PYTHONPATH": os.pathsep.join([str(unpacked), *libraries])}, check=False,
    )  # fmt: skip
    assert visited.returncode == 0, visited.stderr
    assert visited.stdout.splitlines() == ["Réturn", "Réturn", str(unpacked / "tandem_client" / "__init__.py")]
