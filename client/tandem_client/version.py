"""The version of this distribution, for `--version` and for programs.

Owns where the number is found. Reads nothing at import.
"""

import tomllib
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "tandem-inference"
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def version() -> str:
    """The installed distribution's version, else that of the checkout this file is in, else "unknown"."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _checkout_version(_PROJECT) or "unknown"


def _checkout_version(path: Path) -> str | None:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return None
    # Another project's file may stand there if the package was copied into it.
    return project.get("version") if project.get("name") == DISTRIBUTION else None
