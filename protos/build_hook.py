"""Makes the Python stubs of every .proto under protos/ into .stubs/ when the project is built or installed.

Owns `.stubs/`. Knows nothing of what the messages mean. The wheel takes `.stubs/tandem` in as `tandem`; an editable
install puts `.stubs` on the path, so `tandem.v1` imports the same way in both. The wheel holds the public package only:
`tandem.internal` is between the services.

`python protos/build_hook.py` makes the stubs of the checkout it stands in.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def generate(root: Path) -> Path:
    """Writes `.stubs/` under `root` again and returns it. Raises RuntimeError where protoc refuses a file."""
    source, target = root / "protos", root / ".stubs"
    fresh = root / ".stubs.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    files = sorted(str(path.relative_to(source)) for path in source.glob("tandem/**/*.proto"))
    includes = [f"-I{source}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={fresh}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [f"--plugin={name}={_plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    if protoc.main(["protoc", *includes, *plugins, *outputs, *files]) != 0:
        raise RuntimeError(f"protoc refused one of {files}; its message is printed above")
    for package in [fresh / "tandem", *(path for path in (fresh / "tandem").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    (fresh / "tandem" / "py.typed").touch()
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


def _plugin(name: str) -> str:
    """Where a protoc plugin lies: beside this Python, or on the PATH, where an isolated build finds its scripts."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    program = shutil.which(name, path=path)
    if program is None:
        raise RuntimeError(f"{name} is not installed: it comes with mypy-protobuf")
    return program


class StubsBuildHook(BuildHookInterface[Any]):
    """Hatchling calls this before it collects files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the stubs; to a standard wheel, also adds the public ones."""
        stubs = generate(Path(self.root))
        if self.target_name == "wheel" and version == "standard":
            for part in ("__init__.py", "py.typed", "v1"):
                build_data["force_include"][str(stubs / "tandem" / part)] = f"tandem/{part}"


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
