"""Makes the Python stubs of every .proto under protos/ into .stubs/ when the project is built or installed.

Owns `.stubs/`. Knows nothing of what the messages mean. The wheel takes `.stubs/tandem` in as `tandem`; an editable
install puts `.stubs` on the path, so `tandem.v1` imports the same way in both.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def generate(root: Path) -> Path:
    """Writes `.stubs/` under `root` anew and returns it. Raises RuntimeError where protoc refuses a file."""
    source, target = root / "protos", root / ".stubs"
    fresh = root / ".stubs.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    files = sorted(str(path.relative_to(source)) for path in source.glob("tandem/**/*.proto"))
    includes = [f"-I{source}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={fresh}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(sys.executable).parent / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    if protoc.main(["protoc", *includes, *plugins, *outputs, *files]) != 0:
        raise RuntimeError(f"protoc refused one of {files}; its message stands above")
    for package in [fresh / "tandem", *(path for path in (fresh / "tandem").rglob("*") if path.is_dir())]:
        (package / "__init__.py").touch()
    (fresh / "tandem" / "py.typed").touch()
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    return target


class StubsBuildHook(BuildHookInterface[Any]):
    """Hatchling calls this before it collects files."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generates the stubs; in a standard wheel, also adds them to it."""
        stubs = generate(Path(self.root))
        if self.target_name == "wheel" and version == "standard":
            build_data["force_include"][str(stubs / "tandem")] = "tandem"
