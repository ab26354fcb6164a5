"""A working directory with files that have the names of libraries; each notes the command that imports it."""

import sys
from pathlib import Path

from tests.rigs.processes import child_environment

# Libraries beside the standard one, and the own packages.
_OTHERS = (
    *("grpc", "google", "grpc_health", "zmq", "pydantic", "numpy", "torch", "transformers", "tokenizers"),
    *("safetensors", "llguidance", "prometheus_client", "h11", "jinja2", "uvicorn", "uvloop", "httptools", "typer"),
    *("click", "rich", "prompt_toolkit", "tandem_client", "gpu_worker", "scheduler_svc", "tandem", "tandem_contract"),
)
_SHADOW = """
import os, sys
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "ran"), "a") as file:
    print(__name__, *sys.orig_argv, file=file)
raise ImportError(f"{__name__} of the working directory was imported")
"""


def shadowed(folder: Path) -> Path:
    """Writes the files."""
    for name in {*sys.stdlib_module_names, *_OTHERS} - {*sys.builtin_module_names, "__main__"}:
        (folder / f"{name}.py").write_text(_SHADOW)
    return folder


def environment(**changed: str) -> dict[str, str]:
    """PYTHONPATH leads to the packages; an empty entry of it means the working directory."""
    found = child_environment() | changed
    found.pop("PYTHONSAFEPATH", None)
    return found


def ran(folder: Path) -> str:
    """The names of the files that were imported, and by which commands."""
    file = folder / "ran"
    return file.read_text() if file.exists() else ""
